"""Training from Python in one call: budgetformer.train."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from budgetformer.data import DataSource
from budgetformer.runs.run import Run
from budgetformer.training.recipe import Recipe, check_known
from budgetformer.training.run import train as train_run

_SOURCE = {field.name for field in fields(DataSource)} - {"data", "seed"}
_RECIPE = {field.name for field in fields(Recipe)} - {"base", "preset"}


def train(
    data: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] = "run",
    base: str | os.PathLike[str] | None = None,
    preset: str | None = None,
    seed: int = 0,
    with_baseline: bool = False,
    resume: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Run:
    """Train a classifier on `data` into the directory `output`, as `budgetformer train` does, and open it.

    `base` is a pretrained encoder, by directory or hub name, that gets head budgets; else a preset says what is trained
    from scratch. Options are those of DataSource, such as text="review", label="verdict", validation="held_out.csv",
    and those of Recipe, such as epochs=3, learning_rate=5e-5, max_length=128, class_weights="balanced".
    """
    check_known(options, _SOURCE | _RECIPE, "train: option")
    source = DataSource(os.fspath(data), seed=seed, **{k: v for k, v in options.items() if k in _SOURCE})
    recipe = Recipe.make(preset, base=None if base is None else os.fspath(base))
    recipe = recipe.changed({k: v for k, v in options.items() if k in _RECIPE}, where="train")
    train_run(source, recipe, Path(output), with_baseline=with_baseline, resume=resume, quiet=quiet)
    return Run.open(Path(output))
