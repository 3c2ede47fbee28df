"""budgetformer: text classifiers that spend on each text only what it needs: words, layers, attention heads.

Names are loaded when first used, so that importing the package is fast and changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Allocation": "budgetformer.nn.allocation",
    "BudgetFormerClassifier": "budgetformer.estimator",
    "BudgetFormerConfig": "budgetformer.models.model",
    "BudgetFormerError": "budgetformer.errors",
    "BudgetFormerForSequenceClassification": "budgetformer.models.model",
    "BudgetFormerOutput": "budgetformer.models.model",
    "Dial": "budgetformer.dial",
    "ProgressCallback": "budgetformer.models.model",
    "Run": "budgetformer.runs.run",
    "load": "budgetformer.runs.run",
    "retrofit": "budgetformer.models.model",
    "train": "budgetformer.training.run",
}
__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from budgetformer.dial import Dial as Dial
    from budgetformer.errors import BudgetFormerError as BudgetFormerError
    from budgetformer.estimator import BudgetFormerClassifier as BudgetFormerClassifier
    from budgetformer.models.model import BudgetFormerConfig as BudgetFormerConfig
    from budgetformer.models.model import BudgetFormerForSequenceClassification as BudgetFormerForSequenceClassification
    from budgetformer.models.model import BudgetFormerOutput as BudgetFormerOutput
    from budgetformer.models.model import ProgressCallback as ProgressCallback
    from budgetformer.models.model import retrofit as retrofit
    from budgetformer.nn.allocation import Allocation as Allocation
    from budgetformer.runs.run import Run as Run
    from budgetformer.runs.run import load as load
    from budgetformer.training.run import train as train


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'budgetformer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
