"""The paper, on torch alone: allocation, exploration, attention, objective, encoder."""

from budgetformer.dial import Dial
from budgetformer.nn.allocation import (
    AllHeads,
    Allocation,
    FixedBudget,
    HeadAllocator,
    LearnedHeads,
    RandomHeads,
    Selection,
    StaticHeads,
)
from budgetformer.nn.attention import BudgetedAttention
from budgetformer.nn.encoder import BudgetedEncoder
from budgetformer.nn.exploration import Exploration
from budgetformer.nn.objective import Objective

__all__ = [
    "AllHeads", "Allocation", "BudgetedAttention", "BudgetedEncoder", "Dial", "Exploration", "FixedBudget",
    "HeadAllocator", "LearnedHeads", "Objective", "RandomHeads", "Selection", "StaticHeads",
]  # fmt: skip
