"""How large the experiments are: the scales of scales.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from budgetformer.errors import UsageError
from budgetformer.training.recipe import PRESETS, Recipe

DATASETS = ("dbpedia_14", "ag_news", "imdb", "snli", "yelp_review_full")  # the order of the paper's tables
BUDGETS = (0.1, 0.25, 0.5, 0.75, 1.0)
FRACTIONS = (0.1, 0.25, 0.5, 1.0)
SHAPES = {"4L-8H": (4, 8), "4L-12H": (4, 12), "6L-12H": (6, 12), "12L-12H": (12, 12)}
# Rows of the full data sets, from the paper's table of data sets: train, test, classes.
FULL_ROWS = {
    "dbpedia_14": (560_000, 70_000, 14), "ag_news": (120_000, 7_600, 4), "imdb": (25_000, 25_000, 2),
    "snli": (549_367, 9_824, 3), "yelp_review_full": (650_000, 50_000, 5),
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """One data set at one scale. `rows` limits the training rows; None takes all."""

    epochs: int
    max_length: int
    rows: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """One size of all experiments. `model` and `recipe` hold what differs from the paper's preset."""

    name: str
    training: Mapping[str, Training]
    model: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    model_scale: Mapping[str, Any] = field(default_factory=dict)  # options of all four shapes of that table
    model_scale_recipe: Mapping[str, Any] = field(default_factory=dict)
    model_scale_fraction: float = 1.0  # the share of SNLI's rows that they are trained on
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=lambda: SHAPES)
    retrained: tuple[str, ...] = DATASETS  # where fixed and random heads are trained so, beside being overridden
    fixed_budgets: tuple[float, ...] = BUDGETS  # which fixed budgets are trained so; the paper's are all overridden
    controlled: tuple[str, ...] = ("snli", "ag_news", "dbpedia_14")
    staged: tuple[str, ...] = ()  # where a dense model with words and exits stands beside the paper's two
    dense_shapes: tuple[str, ...] = tuple(SHAPES)  # which sizes get a dense twin
    dense_fractions: tuple[float, ...] = FRACTIONS
    widths: tuple[int, ...] = ()  # of dense models on SNLI, beside the rows: which of both more accuracy would need
    width_fraction: float = 1.0  # the share of the rows that they are trained on
    probe_rows: int | None = None  # test rows of each probe; None takes all

    def recipe_for(self, dataset: str, model: Mapping[str, Any], tokenizer: str | None) -> Recipe:
        """The recipe of one cell: the paper's, changed by the scale, the data set and the cell's own model options."""
        training = self.training[dataset]
        options = {**self.model, **training.model, **model}
        changes = {"epochs": training.epochs, "max_length": training.max_length, "tokenizer": tokenizer}
        return PRESETS["paper"].changed({**self.recipe, **changes, "model": options}, where=f"scale {self.name}")


_FILE = tomllib.loads((Path(__file__).parent / "scales.toml").read_text(encoding="utf-8"))
SCALES = {name: TypeAdapter(Scale).validate_python({"name": name, **options}) for name, options in _FILE.items()}


def scale_named(name: str) -> Scale:
    """The scale of this name, or an error that lists them."""
    if name not in SCALES:
        raise UsageError(f"--scale {name}: give one of {', '.join(SCALES)}")
    return SCALES[name]
