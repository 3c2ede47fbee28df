"""A static model with the globally best heads of a budgeted one: no gates, no routing."""

from __future__ import annotations

from transformers import PreTrainedModel

from budgetformer.errors import UsageError
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.models.retrofit import BudgetedClassifier
from budgetformer.models.retrofit_config import RetrofitConfig
from budgetformer.nn.allocation import Dial
from budgetformer.nn.ranking import make_cuts


def freeze(model: BudgetFormerForSequenceClassification, budget: float) -> PreTrainedModel:
    """Keep this share of all heads, those with the highest static scores, whatever the input.

    With all heads the result is an ordinary model of the base's architecture. With fewer it is ours: these
    architectures fix the size of a head to width / heads, so their own code cannot hold fewer.
    """
    if not isinstance(model, BudgetedClassifier) or not model.gates:
        raise UsageError(
            f"a model with the allocator {model.config.allocator!r} has no order of heads to freeze: give a run "
            "that was trained with --base and the allocator ranked or order"
        )
    if not 0 <= budget <= 1:
        raise UsageError(f"budget {budget:g} is outside [0, 1]: it is the share of heads that are kept")
    if budget == 1:
        return model.plain()
    threshold = make_cuts(Dial("mean", budget), model.order, None)[0].threshold
    kept = [row.nonzero().flatten().tolist() for row in model.order > threshold]
    settings = model.config.to_diff_dict()
    for key in ("model_type", "architectures", "transformers_version", "dtype"):
        settings.pop(key, None)
    config = RetrofitConfig(
        **{**settings, "allocator": "given", "kept_heads": kept, "delta": False, "dial_shifts": None}
    )
    frozen = BudgetedClassifier(config, model.plain())
    frozen.train(model.training)
    return frozen
