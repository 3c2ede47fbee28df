"""A run directory: its files, its record, where it comes from."""
