"""Head budgets for a pretrained encoder."""

from budgetformer.retrofit.attention import SUPPORTED
from budgetformer.retrofit.configuration import RetrofitConfig
from budgetformer.retrofit.model import BudgetedClassifier, base_hash, load_base, load_model, read_base, retrofit
from budgetformer.retrofit.ranking import rank_heads, settle_order

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
