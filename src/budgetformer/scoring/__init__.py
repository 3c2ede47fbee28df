"""Texts -> answers: the scorer that predict, serve and the estimator share, and scoring files of any size."""

from budgetformer.scoring.pieces import TextError
from budgetformer.scoring.scorer import Scorer, Scores

__all__ = ["Scorer", "Scores", "TextError"]
