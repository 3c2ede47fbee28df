"""What is done to a trained model at evaluation: budgets overridden, heads given, attention removed.

Shapes: B samples, H heads, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from budgetformer.data.tokens import TokenTable
from budgetformer.engine.scores import Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.nn.allocation import Allocation
from budgetformer_reproduction.scale import BUDGETS


@contextmanager
def hooked(
    model: BudgetFormerForSequenceClassification, hooks: Mapping[int, Callable[..., Allocation | None]]
) -> Iterator[None]:
    """Give some layers' gates (from 0) a forward hook for a while: hook(gate, inputs, allocation)."""
    handles = [model.attentions[n].allocator.register_forward_hook(hook) for n, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fixed_weights(weights_H: Tensor) -> Callable[..., Allocation]:
    """The same heads with the same weights for every input; a head of weight zero is not evaluated."""

    def hook(gate: Any, inputs: Any, allocation: Allocation) -> Allocation:
        weights_BH = weights_H.to(allocation.relevance).expand_as(allocation.active)
        active = weights_BH != 0
        heads = active.sum(dim=-1)
        relevance = weights_BH / weights_BH.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return Allocation(heads / len(weights_H), relevance, heads, active, weights_BH)

    return hook


def some_rows(table: TokenTable, most: int | None) -> NDArray[np.int64]:
    """At most so many rows, drawn without regard to the order of the file, always the same ones."""
    rows = np.arange(len(table))
    if most is None or len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng(0).choice(rows, most, replace=False))


def best_static(model: BudgetFormerForSequenceClassification, table: TokenTable) -> dict[int, Tensor]:
    """For each layer the heads that carry most weight on these rows, with their mean weights, zero elsewhere.

    Every layer keeps the model's mean number of heads, rounded, and at least one.
    """
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    total_LH, uses_LH = torch.zeros(2, layers, heads, dtype=torch.float64)

    def add_up(layer: int) -> Callable[..., None]:
        def hook(gate: Any, inputs: Any, allocation: Allocation) -> None:
            assert allocation.weights is not None
            total_LH[layer] += allocation.weights.double().sum(0).cpu()
            uses_LH[layer] += allocation.active.double().sum(0).cpu()

        return hook

    with hooked(model, {layer: add_up(layer) for layer in range(layers)}):
        score(TorchEngine(model), table)
    k = max(1, round(float(uses_LH.sum() / (layers * len(table)))))
    best = torch.zeros(layers, heads, dtype=torch.bool).scatter(1, total_LH.topk(k).indices, True)
    means = torch.where(best, total_LH / uses_LH.clamp_min(1), 0.0).float()
    return dict(enumerate(means))


def probe(
    model: BudgetFormerForSequenceClassification,
    test: TokenTable,
    validation: TokenTable,
    outcome: Scores,
    most: int | None,
) -> dict[str, Any]:
    """Accuracies of a trained model under every probe, on the same (at most `most`) test rows.

    `learned` is the model as it is, on those rows; against it a probe's right answers are `lost` or `gained`. Removing
    a layer's attention leaves its output bias.
    """
    rows = some_rows(test, most)
    sample = test.select(rows)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    nothing = torch.zeros(heads)
    as_is = outcome.logits[rows].argmax(1) == sample.labels

    def accuracy(dial: str | None = None, weights: Mapping[int, Tensor] | None = None) -> dict[str, float]:
        with hooked(model, {layer: fixed_weights(w) for layer, w in (weights or {}).items()}):
            done = score(TorchEngine(model), sample, dial)
        right = done.logits.argmax(1) == sample.labels
        return {"accuracy": float(right.mean()), "lost": int((as_is & ~right).sum()),
                "gained": int((right & ~as_is).sum()), "k_over_h": float(done.heads.mean() / heads)}  # fmt: skip

    results: dict[str, Any] = {
        "rows": len(sample),
        "learned": {"accuracy": float(as_is.mean()), "k_over_h": float(outcome.heads[rows].mean() / heads)},
        "removed": {str(layer + 1): accuracy(weights={layer: nothing}) for layer in range(layers)},
        "removed_all": accuracy(weights=dict.fromkeys(range(layers), nothing)),
        "removed_from_second": accuracy(weights=dict.fromkeys(range(1, layers), nothing)),
    }
    if not model.config.gate.selects:
        return results
    static = best_static(model, validation.select(some_rows(validation, most)))
    return {
        **results,
        "override": {f"{s:g}": accuracy(f"override:{s:g}") for s in BUDGETS},
        "random": accuracy("random"),
        "one_head": accuracy(f"fixed:{1 / heads:.6f}"),
        "static_heads": {**accuracy(weights=static), "weights": [w.tolist() for w in static.values()]},
    }
