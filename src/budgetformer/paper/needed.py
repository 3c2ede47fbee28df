"""Which cells each experiment needs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from budgetformer.cost.flops import count
from budgetformer.evaluate import model_shape
from budgetformer.models.model import BudgetFormerConfig
from budgetformer.paper.cells import ABLATIONS, TFIDF, Cell, Plan
from budgetformer.paper.scale import BUDGETS, FRACTIONS
from budgetformer.paper.store import Store


def both(plan: Plan) -> list[Cell]:
    """The dense and the learned model on every data set."""
    return [cell for name in plan.datasets for cell in (*plan.dense(name), *plan.learned(name))]


def learned(plan: Plan) -> list[Cell]:
    return [cell for name in plan.datasets for cell in plan.learned(name)]


def fixed(plan: Plan) -> list[Cell]:
    return [*learned(plan), *(c for name in plan.scale.retrained for s in BUDGETS for c in plan.fixed(name, s))]


def random(plan: Plan) -> list[Cell]:
    trained = [c for name in plan.scale.retrained for c in plan.each(name, "random", {"allocator": "random"})]
    return [*learned(plan), *trained]


def model_scale(plan: Plan) -> list[Cell]:
    dense = [c for shape in plan.scale.dense_shapes for c in plan.shaped(shape, "all")]
    return [*(c for shape in plan.scale.shapes for c in plan.shaped(shape, "learned")), *dense]


def data_scale(plan: Plan) -> list[Cell]:
    dense = [c for share in plan.scale.dense_fractions for c in plan.dense("snli", share)]
    return [*(c for share in FRACTIONS for c in plan.learned("snli", share)), *dense]


def snli(plan: Plan) -> list[Cell]:
    return plan.learned("snli")


def ablation(plan: Plan) -> list[Cell]:
    return [
        *plan.learned("snli"),
        *(c for name in ABLATIONS for c in plan.ablated(name)),
    ]


def controls(plan: Plan) -> list[Cell]:
    cells: list[Cell] = []
    for name in plan.scale.controlled:
        cells += [*plan.learned(name), *plan.dense(name), *plan.each(name, "static", {"allocator": "static"})]
        cells += plan.each(name, TFIDF)
    return cells


def controls_later(plan: Plan, store: Store) -> list[Cell]:
    """The controls that must match the learned cells: as many heads for every input, as many FLOPs without gates."""
    return [
        cell
        for name in plan.scale.controlled
        for cell in (*same_heads(plan, store, name), *same_flops(plan, store, name))
    ]


def same_heads(plan: Plan, store: Store, dataset: str) -> list[Cell]:
    """A fixed budget of the learned cells' mean number of executed heads, rounded up to a head."""
    found = store.get(plan.learned(dataset))
    if not found:
        return []
    heads = int(found[0].run["model"]["heads"])
    k = math.ceil(heads * float(np.mean([done.k_over_h for done in found])) - 1e-9)
    return plan.fixed(dataset, min(heads, max(1, k)) / heads)


def same_flops(plan: Plan, store: Store, dataset: str) -> list[Cell]:
    """A dense model whose feed-forward is narrowed until it counts as many FLOPs as the learned cells on average."""
    found = store.get(plan.learned(dataset))
    if not found:
        return []
    config = BudgetFormerConfig.from_pretrained(found[0].folder)
    config.allocator = "all"
    lengths = found[0].rows["lengths"]
    wanted = float(np.mean([done.test["cost"]["flops_per_text"] for done in found]))

    def flops(inner: int) -> float:
        config.intermediate_size = inner
        shape = model_shape(config)
        values, rows = np.unique(lengths, return_counts=True)
        return sum(int(r) * count(shape, int(n), [], "dense").total for n, r in zip(values, rows, strict=True)) / len(
            lengths
        )

    inner = max(1, round((wanted - flops(0)) / (flops(1) - flops(0))))
    return plan.each(dataset, f"dense-ffn{inner}", {"allocator": "all", "intermediate_size": inner})


NEEDED: dict[str, Callable[[Plan], list[Cell]]] = {
    "main": both,
    "fixed": fixed,
    "random": random,
    "model-scale": model_scale,
    "data-scale": data_scale,
    "dynamics": learned,
    "complexity": both,
    "heatmaps": snli,
    "attention-maps": snli,
    "sizes": both,
    "ablation": ablation,
    "controls": controls,
    "needs": both,
}
LATER: dict[str, Callable[[Plan, Store], list[Cell]]] = {"controls": controls_later}
