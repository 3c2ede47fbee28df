"""The numbers that the paper prints, table by table. Its main table is in cost/paper.py, which recomputes it."""

from __future__ import annotations

from budgetformer.cost.paper import MAIN_TABLE

MAIN = {row.dataset: row for row in MAIN_TABLE}

# Accuracy at a fixed budget s of 0.1, 0.25, 0.5, 0.75, 1.0.
FIXED = {
    "dbpedia_14": (0.9846, 0.9478, 0.6202, 0.3245, 0.1670),
    "ag_news": (0.8905, 0.8974, 0.8675, 0.8139, 0.7554),
    "imdb": (0.7296, 0.8036, 0.8246, 0.8289, 0.8162),
    "snli": (0.6704, 0.7598, 0.5838, 0.3541, 0.3190),
    "yelp_review_full": (0.5818, 0.5813, 0.2737, 0.1013, 0.0743),
}
# Accuracy with random heads.
RANDOM = {"dbpedia_14": 0.7511, "ag_news": 0.8180, "imdb": 0.7493, "snli": 0.3370, "yelp_review_full": 0.3244}
# SNLI: Transformer accuracy, BudgetFormer accuracy, mean s.
MODEL_SCALE = {
    "4L-8H": (0.7835, 0.8106, 0.364),
    "4L-12H": (0.7847, 0.8080, 0.310),
    "6L-12H": (0.7922, 0.8065, 0.260),
    "12L-12H": (0.7808, 0.8193, 0.105),
}
DATA_SCALE = {
    0.1: (0.6151, 0.6158, 0.445),
    0.25: (0.6814, 0.7075, 0.427),
    0.5: (0.7243, 0.7738, 0.388),
    1.0: (0.7835, 0.8106, 0.364),
}
