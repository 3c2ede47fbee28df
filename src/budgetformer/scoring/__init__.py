"""Texts -> answers: the scorer that predict, serve and the estimator share, and scoring files of any size."""

from budgetformer.scoring.pieces import TextError
from budgetformer.scoring.scorer import AnyScorer, Scorer, Scores

__all__ = ["AnyScorer", "Scorer", "Scores", "TextError"]
