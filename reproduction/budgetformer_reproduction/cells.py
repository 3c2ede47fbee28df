"""A cell: one training run of one data set, with a directory of its own that all tables share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from budgetformer.data.locate import DataSource
from budgetformer.errors import ModelError, UsageError
from budgetformer.runs.files import equal_as_json, named_read_errors, read_json
from budgetformer.training.recipe import Recipe
from budgetformer_reproduction.scale import DATASETS, FULL_ROWS, Scale

Precision = Literal["fp32", "bf16"]
TFIDF = "tfidf"
REMEDY = "delete the cell's directory and run again"


@dataclass(frozen=True)
class Cell:
    """One run: a data set, a variant (a readable name of its model options), a share of the rows, a seed."""

    dataset: str
    variant: str
    seed: int
    model: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fraction: float = 1.0
    recipe: Mapping[str, Any] = field(default_factory=dict, hash=False)  # what else of the scale's recipe it changes

    @property
    def name(self) -> str:
        part = "" if self.fraction == 1 else f"-{100 * self.fraction:g}pct"
        return f"{self.dataset}-{self.variant}{part}-s{self.seed}"


@dataclass(frozen=True)
class Plan:
    """What is asked for: the scale, the seeds, the data sets, and where everything lies."""

    scale: Scale
    folder: Path
    seeds: tuple[int, ...] = (0,)
    datasets: tuple[str, ...] = DATASETS
    data_dir: str | None = None
    pair: tuple[str, str] = ("", "")  # the two texts of the attention maps
    precision: Precision = "fp32"  # of training, for cells that are not finished
    flop_rate: float | None = None  # FLOPs a second that a dry run assumes; None: those that it measures

    def source(self, dataset: str, fraction: float = 1.0) -> DataSource:
        """The data of a cell: always the same splits; the seed of a cell is that of its training."""
        limit = self.scale.training[dataset].rows if fraction == 1 else self.rows(dataset, fraction)
        return DataSource(dataset, data_dir=self.data_dir, limit=limit)

    def rows(self, dataset: str, fraction: float = 1.0) -> int:
        """How many training rows a share of a data set has at this scale."""
        return round(fraction * (self.scale.training[dataset].rows or FULL_ROWS[dataset][0]))

    def recipe(self, cell: Cell) -> Recipe:
        tokenizer = "bert-base-uncased" if self.scale.name == "paper" else str(self.tokenizer(cell.dataset))
        recipe = self.scale.recipe_for(cell.dataset, cell.model, tokenizer)
        return recipe.changed({"precision": self.precision, **cell.recipe}, where=f"cell {cell.name}")

    def tokenizer(self, dataset: str) -> Path:
        """Where the tokenizer of a data set lies: one for all its cells, so that vocabularies are the same."""
        return (self.folder / "tokenizers" / dataset).absolute()

    def cell(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def log(self, cell: Cell) -> Path:
        return self.folder / "logs" / f"{cell.name}.log"

    def done(self, cell: Cell) -> bool:
        """Whether a cell is finished: trained, evaluated and probed."""
        file = self.cell(cell) / "run.json"
        if not file.exists() or not (file.parent / "probes.json").exists():
            return False
        record = read_json(file, REMEDY)
        if record["status"] != "done":
            return False
        check_outcome(file.parent)
        if "recipe" in record and not equal_as_json(
            _settings(record["recipe"]), _settings(self.recipe(cell).to_json())
        ):
            raise UsageError(f"{file.parent} was trained with other settings than this scale has now: give another -o")
        return True

    def work(self, cell: Cell) -> float:
        """How long a cell takes, in no particular unit: rows times what a row costs."""
        training = self.scale.training[cell.dataset]
        model = {**self.scale.model, **training.model, **cell.model}
        width, inner = model.get("hidden_size", 768), model.get("intermediate_size", 3072)
        layers = model.get("num_hidden_layers", 4)
        rows = self.rows(cell.dataset, cell.fraction)
        if cell.variant == TFIDF:
            return float(rows)
        return float(rows * training.epochs * training.max_length * layers * width * (4 * width + 2 * inner))

    def each(
        self, dataset: str, variant: str, model: Mapping[str, Any] | None = None, fraction: float = 1.0,
        recipe: Mapping[str, Any] | None = None,
    ) -> list[Cell]:  # fmt: skip
        """One cell per seed; none where the data set was not asked for."""
        if dataset not in self.datasets:
            return []
        seeds = self.seeds[:1] if variant == TFIDF else self.seeds
        return [Cell(dataset, variant, seed, model or {}, fraction, recipe or {}) for seed in seeds]

    def learned(self, dataset: str, fraction: float = 1.0) -> list[Cell]:
        return self.each(dataset, "learned", None, fraction)

    def dense(self, dataset: str, fraction: float = 1.0) -> list[Cell]:
        return self.each(dataset, "dense", {"gates": {"kind": "all"}}, fraction)

    def staged(self, dataset: str) -> list[Cell]:
        """Words and exits in a dense model: what this project sets against budgets of heads."""
        options = {"gates": {"kind": "all"}, "exits": {"start": 0.25}}
        return self.each(dataset, "staged", options) if dataset in self.scale.staged else []

    def fixed(self, dataset: str, budget: float) -> list[Cell]:
        return self.each(dataset, f"fixed-{budget:g}", {"gates": {"kind": "fixed", "fixed_budget": budget}})


def check_outcome(folder: Path) -> None:
    """Refuse a finished cell whose outcome.npz is missing, damaged or of an earlier version."""
    file = folder / "outcome.npz"
    with named_read_errors(file, REMEDY), np.load(file, allow_pickle=False) as arrays:
        if "correct" not in arrays.files:
            raise ModelError(f"{file} was written by an earlier version: {REMEDY}")


def _settings(recipe: dict[str, Any]) -> dict[str, Any]:
    """What makes a cell another one: not where the tokenizer lies, nor the precision that a machine is fast in, which
    results state. A key that the record does not know yet has its default."""
    known = {**Recipe().to_json(), **recipe}
    return {key: value for key, value in known.items() if key not in ("tokenizer", "checkpoint_minutes", "precision")}
