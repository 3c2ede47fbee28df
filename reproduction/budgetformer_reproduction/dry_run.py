"""What a reproduction would cost: every distinct model built and stepped twice, its FLOPs counted, nothing trained."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from budgetformer.cost.flops import count
from budgetformer.models.model import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.training.loop import make_optimizer
from budgetformer_reproduction.cells import TFIDF, Cell, Plan
from budgetformer_reproduction.reproduce import needed
from budgetformer_reproduction.scale import FULL_ROWS

_BYTES = 16  # a parameter in fp32: itself, its gradient and AdamW's two moments
_STEPPED_ROWS = 2  # of each of the two steps: enough to measure a rate
_VALIDATION = 0.1  # carved from the training rows where a data set has no validation split


@dataclass(frozen=True)
class Load:
    """What training one cell takes. `flops` are three times those of the forward passes."""

    rows: int
    steps: int
    flops: float


def training_rows(plan: Plan, cell: Cell) -> int:
    """Training rows of a cell, from the sizes of the full data sets that the paper prints."""
    full = FULL_ROWS[cell.dataset][0]
    rows = full if cell.dataset == "snli" else full - round(_VALIDATION * full)
    limit = plan.source(cell.dataset, cell.fraction).limit
    return min(rows, limit) if limit else rows


def config_of(plan: Plan, cell: Cell) -> BudgetFormerConfig:
    """The model of a cell, with the vocabulary and the labels that the full data would give."""
    recipe = plan.recipe(cell)
    options: dict[str, Any] = {"vocab_size": recipe.vocab_size, "num_labels": FULL_ROWS[cell.dataset][2]}
    return BudgetFormerConfig.preset(recipe.preset, **{**options, **recipe.model})


def load_of(plan: Plan, cell: Cell) -> Load:
    """Steps and FLOPs of training one cell, all heads evaluated, every row padded to the scale's length."""
    recipe, config, rows = plan.recipe(cell), config_of(plan, cell), training_rows(plan, cell)
    assert recipe.batch_size is not None
    every = [float(config.num_attention_heads)] * config.num_hidden_layers
    kind = "dense" if not config.gate.selects else "paper"
    forward = count(config.spec.shape, recipe.max_length, every, kind).total  # type: ignore[arg-type]
    return Load(rows, recipe.epochs * math.ceil(rows / recipe.batch_size), 3 * forward * rows * recipe.epochs)


def two_steps(plan: Plan, cell: Cell) -> tuple[int, float]:
    """Build the cell's model and train it for two steps on random tokens: its parameters, and FLOPs a second."""
    recipe, config = plan.recipe(cell), config_of(plan, cell)
    model = BudgetFormerForSequenceClassification(config).train()
    optimizer = make_optimizer(model, recipe)
    began = 0.0
    for step in range(2):
        ids = torch.randint(config.vocab_size, (_STEPPED_ROWS, recipe.max_length))
        labels = torch.randint(config.labels, (_STEPPED_ROWS,))
        began = time.perf_counter()
        model(ids, labels=labels, progress=step / 2).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    load = load_of(plan, cell)
    flops = load.flops / (load.rows * recipe.epochs) * _STEPPED_ROWS
    return sum(p.numel() for p in model.parameters()), flops / (time.perf_counter() - began)


def dry_run(plan: Plan, experiments: Sequence[str]) -> None:
    """Print the cost of every distinct model, and of all cells together."""
    rate = plan.flop_rate
    cells = [cell for cell in needed(plan, experiments).values() if cell.variant != TFIDF]
    models: dict[str, list[Cell]] = {}
    for cell in cells:
        config = config_of(plan, cell)
        if "fixed_budget" in config.gates:
            config.gates["fixed_budget"] = 0.5  # another s is no other model
        models.setdefault(f"{config.to_json_string(use_diff=False)} {plan.recipe(cell).max_length}", []).append(cell)
    print(f"{len(cells)} cells, {len(models)} distinct models, scale {plan.scale.name}; rows from the paper's table")
    hours = flops = steps = 0.0
    for alike in models.values():
        parameters, measured_rate = two_steps(plan, alike[0])
        loads = [load_of(plan, cell) for cell in alike]
        their_flops = sum(load.flops for load in loads)
        their_hours = their_flops / (rate or measured_rate) / 3600
        flops, steps, hours = flops + their_flops, steps + sum(load.steps for load in loads), hours + their_hours
        name = alike[0].name.rpartition("-")[0]
        print(
            f"{name}: {len(alike)} cells, {loads[0].rows:,} rows, {loads[0].steps:,} steps, "
            f"{parameters:,} parameters, {_BYTES * parameters / 2**20:,.0f} MiB with gradients and optimiser, "
            f"{their_flops:.3g} FLOPs, {their_hours:,.1f} h",
            flush=True,
        )
    source = (
        f"{rate:.3g} FLOPs a second, given" if rate else f"rates measured here in two steps of {_STEPPED_ROWS} rows"
    )
    print(
        f"in all: {steps:,.0f} steps, {flops:.3g} training FLOPs (3 x forward, padded to full length), {hours:,.1f} h "
        f"at {source}; evaluation, and controls that depend on results, are not counted"
    )
