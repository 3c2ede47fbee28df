"""What is done to a trained model at evaluation: budgets overridden, heads given, attention removed.

Shapes: B samples, N tokens, D model width, H heads, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from budgetformer.data import TokenTable, collate, eval_plan
from budgetformer.engine.scores import Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.nn.allocation import Allocation, Dial, HeadAllocator
from budgetformer.paper.scale import BUDGETS


class GivenHeads(HeadAllocator):
    """The same heads with the same weights for every input; a head of weight zero is not evaluated."""

    def __init__(self, weights_H: Tensor) -> None:
        super().__init__(len(weights_H))
        self.weights_H: Tensor
        self.register_buffer("weights_H", weights_H.float())

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Dial | None = None) -> Allocation:
        weights_BH = self.weights_H.expand(x_BND.shape[0], -1)
        active = weights_BH != 0
        heads = active.sum(dim=-1)
        relevance = weights_BH / weights_BH.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return Allocation(heads / self.num_heads, relevance, heads, active, weights_BH)


@contextmanager
def given(model: BudgetFormerForSequenceClassification, weights: Mapping[int, Tensor]) -> Iterator[None]:
    """Give some layers (from 0) fixed heads for a while; the model's own allocators come back afterwards."""
    own = {layer: model.encoder.blocks[layer].attention.allocator for layer in weights}
    try:
        for layer, weights_H in weights.items():
            model.encoder.blocks[layer].attention.allocator = GivenHeads(weights_H).to(model.device)
        yield
    finally:
        for layer, allocator in own.items():
            model.encoder.blocks[layer].attention.allocator = allocator


def some_rows(encoded: TokenTable, most: int | None) -> NDArray[np.int64]:
    """At most so many rows, drawn without regard to the order of the file, always the same ones."""
    rows = np.arange(len(encoded))
    if most is None or len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng(0).choice(rows, most, replace=False))


def head_weights(model: BudgetFormerForSequenceClassification, encoded: TokenTable) -> tuple[Tensor, Tensor, float]:
    """Each head's total weight and its mean weight where it is used (L, H), and the mean number of heads a layer."""
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    total, uses = torch.zeros(layers, heads, dtype=torch.float64), torch.zeros(layers, heads, dtype=torch.float64)
    model.train(False)
    with torch.inference_mode():
        for chosen in eval_plan(
            encoded.lengths, token_budget=max(TorchEngine(model).batch_tokens, int(encoded.lengths.max()))
        ):
            inputs = collate(encoded, chosen, model.config.pad_token_id or 0).tensors(model.device)
            inputs.pop("labels", None)
            out = model(**inputs)
            for layer, allocation in enumerate(out.allocations):
                assert allocation.weights is not None
                total[layer] += allocation.weights.double().sum(0).cpu()
                uses[layer] += allocation.active.double().sum(0).cpu()
    return total, total / uses.clamp_min(1), float(uses.sum() / (layers * len(encoded)))


def best_static(model: BudgetFormerForSequenceClassification, encoded: TokenTable) -> dict[int, Tensor]:
    """For each layer the heads that carry most weight on these rows, with their mean weights, zero elsewhere.

    Every layer keeps the model's mean number of heads, rounded, and at least one.
    """
    total, mean, used = head_weights(model, encoded)
    k = max(1, round(used))
    kept: dict[int, Tensor] = {}
    for layer in range(total.shape[0]):
        weights = torch.zeros(total.shape[1])
        best = total[layer].topk(k).indices
        weights[best] = mean[layer, best].float()
        kept[layer] = weights
    return kept


def probe(
    model: BudgetFormerForSequenceClassification,
    test: TokenTable,
    validation: TokenTable,
    outcome: Scores,
    most: int | None,
) -> dict[str, Any]:
    """Accuracies of a trained model under every probe, on the same (at most `most`) test rows.

    `learned` is the model as it is, on those rows. Removing a layer's attention leaves its output bias.
    """
    rows = some_rows(test, most)
    few = test.select(rows)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    nothing = torch.zeros(heads)

    def accuracy(dial: str | None = None, weights: Mapping[int, Tensor] | None = None) -> dict[str, float]:
        with given(model, weights or {}):
            done = score(TorchEngine(model), few, dial)
        return {"accuracy": float((done.logits.argmax(1) == few.labels).mean()),
                "k_over_h": float(done.heads.mean() / heads)}  # fmt: skip

    learned = float((outcome.logits[rows].argmax(1) == few.labels).mean())
    results: dict[str, Any] = {
        "rows": len(few),
        "learned": {"accuracy": learned, "k_over_h": float(outcome.heads[rows].mean() / heads)},
        "removed": {str(layer + 1): accuracy(weights={layer: nothing}) for layer in range(layers)},
        "removed_all": accuracy(weights=dict.fromkeys(range(layers), nothing)),
        "removed_from_second": accuracy(weights=dict.fromkeys(range(1, layers), nothing)),
    }
    if model.config.allocator == "all":
        return results
    static = best_static(model, validation.select(some_rows(validation, most)))
    return {
        **results,
        "override": {f"{s:g}": accuracy(f"override:{s:g}") for s in BUDGETS},
        "random": accuracy("random"),
        "one_head": accuracy(f"fixed:{1 / heads:.6f}"),
        "static_heads": {**accuracy(weights=static), "weights": [w.tolist() for w in static.values()]},
    }
