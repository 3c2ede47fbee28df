"""How large the experiments are. Everything that differs between the paper and a smaller machine is in this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from budgetformer.errors import UsageError
from budgetformer.training.recipe import PRESETS, Recipe

DATASETS = ("dbpedia_14", "ag_news", "imdb", "snli", "yelp_review_full")  # the order of the paper's tables
BUDGETS = (0.1, 0.25, 0.5, 0.75, 1.0)
FRACTIONS = (0.1, 0.25, 0.5, 1.0)
SHAPES = {"4L-8H": (4, 8), "4L-12H": (4, 12), "6L-12H": (6, 12), "12L-12H": (12, 12)}
# Rows of the full data sets, from the paper's table of data sets: train, test, classes.
FULL_ROWS = {
    "dbpedia_14": (560_000, 70_000, 14),
    "ag_news": (120_000, 7_600, 4),
    "imdb": (25_000, 25_000, 2),
    "snli": (549_367, 9_824, 3),
    "yelp_review_full": (650_000, 50_000, 5),
}


@dataclass(frozen=True)
class Training:
    """One data set at one scale. `rows` limits the training rows; None takes all."""

    rows: int | None
    epochs: int
    max_length: int
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
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=lambda: SHAPES)
    retrained: tuple[str, ...] = DATASETS  # where fixed and random heads are trained so, beside being overridden
    controlled: tuple[str, ...] = ("snli", "ag_news", "dbpedia_14")
    dense_shapes: tuple[str, ...] = tuple(SHAPES)  # which sizes get a dense twin
    dense_fractions: tuple[float, ...] = FRACTIONS
    probe_rows: int | None = None  # test rows of each probe; None takes all

    def recipe_for(self, dataset: str, model: Mapping[str, Any], tokenizer: str | None) -> Recipe:
        """The recipe of one cell: the paper's, changed by the scale, the data set and the cell's own model options."""
        training = self.training[dataset]
        options = {**self.model, **training.model, **model}
        changes = {"epochs": training.epochs, "max_length": training.max_length, "tokenizer": tokenizer}
        return PRESETS["paper"].changed({**self.recipe, **changes, "model": options}, where=f"scale {self.name}")


_PAIRS = {"scale_embeddings": True, "segment_embeddings": True}

SCALES = {
    "paper": Scale(
        name="paper",
        training={
            "dbpedia_14": Training(None, 10, 64),
            "ag_news": Training(None, 10, 64),
            "imdb": Training(None, 10, 512),
            "snli": Training(None, 10, 64),
            "yelp_review_full": Training(None, 10, 512),
        },
    ),
    # Small enough for two cores. So few steps do not learn much without scaled embeddings, nor pairs of texts without
    # segments: every model has them, the dense one too. The method itself is the paper's.
    "cpu": Scale(
        name="cpu",
        training={
            "dbpedia_14": Training(10_000, 3, 64),
            "ag_news": Training(16_000, 2, 64),
            "imdb": Training(8_000, 3, 96),
            "snli": Training(18_000, 3, 64, _PAIRS),
            "yelp_review_full": Training(4_000, 4, 96),
        },
        model={
            "hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 128, "attention_dropout": 0.0,
            "scale_embeddings": True,
        },
        recipe={
            "batch_size": 64, "learning_rate": 2e-3, "schedule": "linear", "warmup": 100, "clip": 1.0,
            "vocab_size": 8000,
        },
        model_scale={"hidden_size": 48, "intermediate_size": 192},
        model_scale_recipe={"learning_rate": 5e-4},  # at 2e-3 twelve layers do not learn
        retrained=("snli",),
        controlled=("snli", "ag_news"),
        dense_shapes=(),
        dense_fractions=(0.1, 1.0),
        probe_rows=2000,
    ),
    "smoke": Scale(
        name="smoke",
        training={name: Training(200, 1, 16, _PAIRS if name == "snli" else {}) for name in DATASETS},
        model={
            "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 16, "attention_dropout": 0.0,
        },
        recipe={"batch_size": 32, "learning_rate": 3e-3, "vocab_size": 1000},
        model_scale={"hidden_size": 8},
        shapes={"2L-2H": (2, 2), "2L-4H": (2, 4)},
        retrained=("snli",),
        controlled=("snli",),
        dense_shapes=("2L-4H",),
        dense_fractions=(1.0,),
        probe_rows=50,
    ),
}  # fmt: skip


def scale_named(name: str) -> Scale:
    """The scale of this name, or an error that lists them."""
    if name not in SCALES:
        raise UsageError(f"--scale {name}: give one of {', '.join(SCALES)}")
    return SCALES[name]
