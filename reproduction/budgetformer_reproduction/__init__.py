"""The paper's tables and figures: a grid of training runs, what they show, and the published numbers beside it."""
