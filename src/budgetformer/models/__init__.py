"""The model over a base, its config, and what is done to its heads. Importing `model` loads transformers' models."""
