"""Training: recipes, the loop, checkpoints, and runs from data to a finished directory."""
