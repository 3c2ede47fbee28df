"""Head budgets for a pretrained encoder."""

from budgetformer.models.importance import rank_heads, settle_order
from budgetformer.models.retrofit import BudgetedClassifier, base_hash, load_base, load_model, read_base, retrofit
from budgetformer.models.retrofit_config import RetrofitConfig
from budgetformer.models.sites import SUPPORTED

__all__ = [
    "SUPPORTED",
    "BudgetedClassifier",
    "RetrofitConfig",
    "base_hash",
    "load_base",
    "load_model",
    "rank_heads",
    "read_base",
    "retrofit",
    "settle_order",
]
