"""The order that ranked heads start from, and the calibration of their dial. Both look at batches of training rows.

A batch is an object or a mapping with input_ids, attention_mask, token_type_ids (if any) and labels, such as a Hugging
Face DataLoader yields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from budgetformer.errors import UsageError
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.nn.allocation import Allocation, pool
from budgetformer.nn.objective import task_loss
from budgetformer.nn.ranking import OrderedHeads, RankedHeads, cumulative_prices, score_above_share, thresholds

Ranking = Literal["importance", "random"]


def rank_heads(
    model: BudgetFormerForSequenceClassification,
    batches: Iterable[Any],
    *,
    ranking: Ranking = "importance",
    seed: int = 0,
) -> list[Tensor]:
    """Set the gates' static scores, and the mean input that they depart from.

    `importance` is Michel et al.'s: the mean size of the gradient of each text's loss by a head's weight, each layer
    scaled to length 1; so too for groups of feed-forward neurons, after the neurons of each layer are sorted by theirs
    (but for a delta, whose base stays as it is). Returns the importance of each gate's units by their price; scores are
    its ranks, evenly spread over (0, 1); with `keep_heads` those of heads are far above.
    """
    if not model.config.gate.ranks_layers:
        raise UsageError(f"gates of the kind {model.config.kind!r} have no order of heads: give ranked or order")
    model.config.gates["threshold_offsets"] = None
    importance = _measure(model, batches)
    if ranking == "random":
        drawn = torch.Generator().manual_seed(seed)
        importance = [torch.rand(len(units), generator=drawn) for units in importance]
    places = torch.cat(importance).argsort(descending=True).argsort()
    scores = torch.split(1 - (places + 0.5) / len(places), [len(units) for units in importance])
    with torch.no_grad():
        for gate, score in zip(model.ranked_gates, scores, strict=True):
            gate.score.copy_(score + gate.first_score)
    return importance


def calibrate_thresholds(model: BudgetFormerForSequenceClassification, batches: Iterable[Any]) -> None:
    """Make mean:X execute X of all heads (and groups, by price), as seen on these batches.

    What inputs add to the scores on average goes into the static scores: no score changes, and freezing keeps the heads
    that inputs choose most. Then thresholds are moved to where the scores of these rows leave X of the heads above, at
    eighths of the dial. To be called again after further training.
    """
    gates = [gate for gate in model.ranked_gates if isinstance(gate, RankedHeads)]
    if not gates:
        return
    batches, options = list(batches), model.config.gates
    options["threshold_offsets"] = None
    for gate, pooled_RD in zip(gates, _pooled_at(model, batches, "learned"), strict=True):
        mean_D = pooled_RD.mean(dim=0)
        gate.score.data.add_(gate.scorer((mean_D - gate.centre) / gate.scale).detach())
        gate.centre.copy_(mean_D)
    table, prices = thresholds(model.order), model.prices
    units, paid = len(table) - 1, cumulative_prices(model.order, prices)
    offsets: list[tuple[int, float]] = []
    for k in sorted({round(step * units / 8) for step in range(1, 8)} - {0, units}, reverse=True):
        offsets.insert(0, (k, offsets[0][1] if offsets else 0.0))
        share = k / units if paid is None else float(paid[k - 1])
        for _ in range(2):  # what layers see depends on the threshold
            options["threshold_offsets"] = offsets
            pooled = _pooled_at(model, batches, f"mean:{share}")
            scores_RU = torch.cat([gate.scores_at(x) for gate, x in zip(gates, pooled, strict=True)], dim=1).detach()
            offsets[0] = (k, float(score_above_share(scores_RU, share, prices) - table[k]))
    options["threshold_offsets"] = offsets


@torch.no_grad()
def sort_units(model: BudgetFormerForSequenceClassification) -> None:
    """Number the heads and groups of each layer by their scores, best first, which changes nothing that they compute.

    What a budget leaves of a layer is then neighbours, which are computed together. It is for a model with one order
    for all inputs, once that is learned; a delta's base stays as it is.
    """
    if model.config.delta:
        return
    modules: list[Any] = [*model.attentions, *model.feedforwards]
    for module in modules:
        if isinstance(gate := module.allocator, OrderedHeads):
            order = gate.score.argsort(descending=True, stable=True).tolist()
            gate.score.copy_(gate.score[order])
            module.select(order)


@torch.no_grad()
def _pooled_at(model: BudgetFormerForSequenceClassification, batches: Iterable[Any], dial: str) -> list[Tensor]:
    """The pooled inputs of every gate when the batches run at a dial. -> for each (rows, D)."""
    with _recorded(model) as inputs:
        for batch in batches:
            fields = _fields(batch, model.device)
            fields.pop("labels", None)
            model(**fields, budget=dial)
    return [torch.cat(rows) for rows in inputs]


def _measure(model: BudgetFormerForSequenceClassification, batches: Iterable[Any]) -> list[Tensor]:
    """The importance of every gate's units; neurons sorted, and the gates' `centre` and `scale` set to their inputs."""
    config, gates = model.config, model.ranked_gates
    by_gate: list[list[Tensor]] = [[] for _ in gates]  # slopes of each text's loss by the weights of heads or neurons
    with _recorded(model) as inputs, _neuron_weights(model):
        for batch in batches:
            fields = _fields(batch, model.device)
            labels = fields.pop("labels")
            out = model(**fields, budget="full")
            loss = task_loss(out.logits, labels, config.task) * len(labels)  # the gradient of every text's
            weights = [a.weights for a in out.allocations] + [a.groups for a in out.allocations if a.groups is not None]
            for rows, slope in zip(by_gate, torch.autograd.grad(loss, weights), strict=True):
                rows.append(slope.cpu())
    for gate, rows in zip(gates, inputs, strict=True):
        if isinstance(gate, RankedHeads):
            pooled_RD = torch.cat(rows)
            gate.centre.copy_(pooled_RD.mean(dim=0))
            size = (pooled_RD - gate.centre).norm(dim=1).mean().clamp(min=1e-6)
            gate.scale.copy_(size * len(gate.centre) ** 0.5)  # so that it learns no faster than static scores
    slopes = [torch.cat(rows) for rows in by_gate]
    for number, module in enumerate(model.feedforwards, config.num_hidden_layers):
        if not config.delta:
            order_I = slopes[number].abs().sum(dim=0).argsort(descending=True, stable=True)
            module.select_neurons(order_I)
            slopes[number] = slopes[number][:, order_I]
        slopes[number] = slopes[number].view(-1, config.groups, module.size).sum(dim=-1)
    totals = [slope.abs().sum(dim=0) for slope in slopes]
    shares = [total / total.norm().clamp(min=torch.finfo(torch.float32).tiny) for total in totals]
    if (prices := model.prices) is None:
        return shares
    by_gate_prices = torch.split(prices.cpu(), [len(share) for share in shares])
    return [share / price for share, price in zip(shares, by_gate_prices, strict=True)]


@contextmanager
def _neuron_weights(model: BudgetFormerForSequenceClassification) -> Iterator[None]:
    """Meanwhile every feed-forward neuron has a weight, one, instead of its group."""

    def weights(_: Any, args: Any, allocation: Allocation) -> Allocation:
        ones = torch.ones(len(args[0]), model.config.neurons, device=model.device, requires_grad=True)
        return allocation._replace(weights=ones)

    hooks = [module.allocator.register_forward_hook(weights) for module in model.feedforwards]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fields(batch: Any, device: torch.device) -> dict[str, Tensor]:
    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    values = {n: batch.get(n) if isinstance(batch, Mapping) else getattr(batch, n, None) for n in names}
    return {name: value.to(device) for name, value in values.items() if value is not None}


@contextmanager
def _recorded(model: BudgetFormerForSequenceClassification) -> Iterator[list[list[Tensor]]]:
    """The pooled inputs that pass each gate meanwhile, for evaluation and with a gradient by every head's weight."""
    gates, was_training = model.ranked_gates, model.training
    learned = [gate.score.requires_grad for gate in gates]
    inputs: list[list[Tensor]] = [[] for _ in gates]

    def recorder(layer: int) -> Any:
        return lambda _, args: inputs[layer].append(pool(args[0].detach(), args[1]))

    hooks = [gate.register_forward_pre_hook(recorder(layer)) for layer, gate in enumerate(gates)]
    try:
        model.train(False)
        for gate in gates:
            gate.score.requires_grad_(True)  # also where the order is not learned
        yield inputs
    finally:
        model.train(was_training)
        for gate, was, hook in zip(gates, learned, hooks, strict=True):
            gate.score.requires_grad_(was)
            hook.remove()
