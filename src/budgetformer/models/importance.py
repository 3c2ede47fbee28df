"""The order that ranked heads start from: how much each head matters to a model that is trained already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from budgetformer.data import TokenTable, collate, eval_plan
from budgetformer.data.splits import sample_rows
from budgetformer.errors import UsageError
from budgetformer.models.retrofit import BudgetedClassifier
from budgetformer.nn.allocation import pool
from budgetformer.nn.objective import task_loss
from budgetformer.nn.ranking import RankedHeads, thresholds

Ranking = Literal["importance", "random"]
_TOKENS = 4096  # padded tokens of one batch


def rank_heads(
    model: BudgetedClassifier, encoded: TokenTable, *, rows: int = 1024, ranking: Ranking = "importance", seed: int = 0
) -> Tensor:
    """Set the gates' static scores, and the mean input that they depart from, by a look at some training rows.

    `importance` is Michel et al.'s: the mean size of the gradient of each text's loss by a head's weight, each layer
    scaled to length 1. Returns the importance, (L, H); scores are its ranks, evenly spread over (0, 1).
    """
    if not model.gates:
        raise UsageError(f"allocator={model.config.allocator!r} has no order of heads: give ranked or order")
    model.config.dial_shifts = None
    importance = _look(model, encoded, rows)
    if ranking == "random":
        importance = torch.rand(importance.shape, generator=torch.Generator().manual_seed(seed))
    places = importance.flatten().argsort(descending=True).argsort().view_as(importance)
    scores = 1 - (places + 0.5) / places.numel()
    with torch.no_grad():
        for gate, score in zip(model.gates, scores, strict=True):
            gate.score.copy_(score)
    return importance


def settle_order(model: BudgetedClassifier, encoded: TokenTable, *, rows: int = 256) -> None:
    """Make mean:X execute X of all heads, as seen on some training rows.

    What inputs add to the scores on average goes into the static scores: no score changes, and freezing keeps the heads
    that inputs choose most. Then thresholds are moved to where the scores of these rows leave X of the heads above, at
    eighths of the dial. To be called again after further training.
    """
    gates = [gate for gate in model.gates if gate.scorer is not None]
    if not gates:
        return
    model.config.dial_shifts = None
    for gate, pooled_RD in zip(gates, _pooled(model, gates, encoded, rows, "learned"), strict=True):
        assert gate.scorer is not None
        mean_D = pooled_RD.mean(dim=0)
        gate.score.data.add_(gate.scorer((mean_D - gate.centre) / gate.scale).detach())
        gate.centre.copy_(mean_D)
    table = thresholds(model.order)
    heads = len(table) - 1
    shifts: list[tuple[int, float]] = []
    for k in sorted({round(step * heads / 8) for step in range(1, 8)} - {0, heads}, reverse=True):
        shifts.insert(0, (k, shifts[0][1] if shifts else 0.0))
        for _ in range(2):  # what layers see depends on the threshold
            model.config.dial_shifts = shifts
            pooled = _pooled(model, gates, encoded, rows, f"mean:{k / heads}")
            scores = torch.stack([gate.scores_at(x) for gate, x in zip(gates, pooled, strict=True)]).detach()
            shifts[0] = (k, float(scores.quantile(1 - k / heads) - table[k]))
    model.config.dial_shifts = shifts


@torch.no_grad()
def _pooled(
    model: BudgetedClassifier, gates: Sequence[RankedHeads], encoded: TokenTable, rows: int, dial: str
) -> list[Tensor]:
    """The pooled inputs of every gate when some rows run at a dial. -> for each (rows, D)."""
    with _inputs_of(gates) as inputs:
        for batch in _batches(model, encoded, rows):
            model(**{k: v for k, v in batch.items() if k != "labels"}, budget=dial)
    return [torch.cat(found) for found in inputs]


@contextmanager
def _inputs_of(gates: Sequence[RankedHeads]) -> Iterator[list[list[Tensor]]]:
    """The pooled inputs that pass each gate meanwhile."""
    inputs: list[list[Tensor]] = [[] for _ in gates]

    def keeper(layer: int) -> Any:
        return lambda _, given: inputs[layer].append(pool(given[0].detach(), given[1]))

    hooks = [gate.register_forward_pre_hook(keeper(layer)) for layer, gate in enumerate(gates)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _batches(model: BudgetedClassifier, encoded: TokenTable, rows: int) -> Iterator[dict[str, Tensor]]:
    """So many rows from all over the file, for evaluation; the model's mode comes back afterwards."""
    was_training = model.training
    model.train(False)
    some = sample_rows(len(encoded), rows)
    lengths = encoded.lengths[some]
    for chosen in eval_plan(lengths, token_budget=max(_TOKENS, int(lengths.max(initial=1)))):
        yield collate(encoded, some[chosen], model.config.pad_token_id or 0).tensors(model.device)
    model.train(was_training)


def _look(model: BudgetedClassifier, encoded: TokenTable, rows: int) -> Tensor:
    """Every head's importance; on the way, the mean and spread of each layer's pooled input."""
    config = model.config
    learns = [gate.score.requires_grad for gate in model.gates]
    for gate in model.gates:
        gate.score.requires_grad_(True)
    total = torch.zeros(config.num_hidden_layers, config.num_attention_heads)
    with _inputs_of(model.gates) as inputs:
        for batch in _batches(model, encoded, rows):
            labels = batch.pop("labels")
            out = model(**batch, budget="full")
            loss = task_loss(out.logits, labels, config.task) * len(labels)  # the gradient of every text's
            slopes = torch.autograd.grad(loss, [a.weights for a in out.allocations])
            total += torch.stack([slope.abs().sum(dim=0) for slope in slopes]).cpu()
    for gate, learnt in zip(model.gates, learns, strict=True):
        gate.score.requires_grad_(learnt)
    for gate, found in zip(model.gates, inputs, strict=True):
        if gate.scorer is not None:
            pooled_RD = torch.cat(found)
            gate.centre.copy_(pooled_RD.mean(dim=0))
            size = (pooled_RD - gate.centre).norm(dim=1).mean().clamp(min=1e-6)
            gate.scale.copy_(size * len(gate.centre) ** 0.5)  # so that it learns no faster than static scores
    length_L1: Tensor = total.norm(dim=1, keepdim=True)
    return total / length_L1.clamp(min=float(np.finfo(np.float32).tiny))
