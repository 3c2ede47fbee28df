"""The model over a base, its config, and what is done to its heads; importing this registers it with transformers."""

from budgetformer.models.bases import base_hash, load_base, read_base
from budgetformer.models.config import BudgetFormerConfig
from budgetformer.models.importance import calibrate_thresholds, rank_heads
from budgetformer.models.model import (
    BudgetFormerForSequenceClassification,
    BudgetFormerOutput,
    ProgressCallback,
    retrofit,
)

__all__ = [
    "BudgetFormerConfig",
    "BudgetFormerForSequenceClassification",
    "BudgetFormerOutput",
    "ProgressCallback",
    "base_hash",
    "calibrate_thresholds",
    "load_base",
    "rank_heads",
    "read_base",
    "retrofit",
]
