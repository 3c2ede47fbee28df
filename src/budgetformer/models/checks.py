"""What a model may be called with."""

from __future__ import annotations

from torch import Tensor

from budgetformer.errors import UsageError
from budgetformer.models.config import BudgetFormerConfig


def check_ids(config: BudgetFormerConfig, ids: Tensor) -> None:
    """Refuse token ids that the model has no place for."""
    if ids.dim() != 2 or ids.numel() == 0:
        raise UsageError(f"input_ids has shape {tuple(ids.shape)}: give (batch, tokens), both at least 1")
    low, high = ids.aminmax()
    if int(low) < 0 or int(high) >= config.vocab_size:
        wrong = int(high) if int(low) >= 0 else int(low)
        raise UsageError(
            f"input_ids contains {wrong}, outside the vocabulary of {config.vocab_size}: "
            "use the tokenizer that the model was trained with"
        )
    if (length := ids.shape[1]) > (limit := config.max_position_embeddings):
        raise UsageError(
            f"the input has {length} tokens but the model has {limit} positions: truncate the text "
            f"(tokenizer(..., truncation=True, max_length={limit})) or use a model with more positions"
        )


def check_labels(config: BudgetFormerConfig, labels: Tensor) -> None:
    """Refuse labels that are not the model's."""
    n, task = config.labels, config.task
    if task == "single_label_classification":
        low, high = labels.aminmax()
        if labels.is_floating_point() or int(low) < 0 or int(high) >= n:
            raise UsageError(
                f"labels hold values from {low.item()} to {high.item()}, but the model has num_labels={n}: give "
                f"whole numbers from 0 to {n - 1}, or set num_labels or problem_type"
            )
    elif task == "multi_label_classification" and labels.shape[-1] != n:
        raise UsageError(f"labels have shape {tuple(labels.shape)}: give one 0 or 1 for each of {n} labels")
