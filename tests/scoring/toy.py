"""Small scorers that need no training: random weights, a tokenizer of a few words."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from budgetformer import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.data import train_tokenizer
from budgetformer.scoring import Scorer

WORDS = "the film was a story of some people in town with music and light great awful".split()


@cache
def tokenizer() -> Any:
    return train_tokenizer([" ".join(WORDS)] * 3, vocab_size=200)


def make_model(**options: Any) -> BudgetFormerForSequenceClassification:
    torch.manual_seed(0)
    made = {"vocab_size": len(tokenizer()), "id2label": {0: "neg", 1: "pos", 2: "none"}, "training_progress": 1.0}
    config = BudgetFormerConfig.preset(
        "tiny", **{**made, "budget_as": "count", "tau_min": 1.0, "initializer_range": 0.2, **options}
    )
    return BudgetFormerForSequenceClassification(config)


def make_scorer(max_length: int = 16, *, config: dict[str, Any] | None = None, **options: Any) -> Scorer:
    return Scorer(make_model(**(config or {})), tokenizer(), max_length, **options)
