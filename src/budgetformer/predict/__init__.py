"""Scoring files of any size: resumable, in shards, on a cluster."""
