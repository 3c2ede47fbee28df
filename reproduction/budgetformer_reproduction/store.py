"""Reading finished cells back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.runs.files import read_json
from budgetformer_reproduction.cells import REMEDY, Cell, Plan


@dataclass(frozen=True)
class Done:
    """A finished cell: what its files say, each read when first needed."""

    cell: Cell
    folder: Path

    @cached_property
    def rows(self) -> dict[str, NDArray[Any]]:
        """What happened on each test row: the arrays of outcome.npz."""
        with np.load(self.folder / "outcome.npz", allow_pickle=False) as file:
            return {name: file[name] for name in file.files}

    @cached_property
    def run(self) -> dict[str, Any]:
        return dict(read_json(self.folder / "run.json", REMEDY))

    @cached_property
    def probes(self) -> dict[str, Any]:
        return dict(read_json(self.folder / "probes.json", REMEDY))

    @cached_property
    def test(self) -> dict[str, Any]:
        """The evaluation on the test rows, as learned."""
        return dict(read_json(self.folder / "evaluation.json", REMEDY)["test"])

    def history(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind, step or epoch, in the order of training."""
        lines = (self.folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]

    @cached_property
    def correct(self) -> NDArray[np.bool_]:
        return np.asarray(self.rows["correct"])

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())

    @property
    def soft_accuracy(self) -> float:
        return float(self.rows["soft_correct"].mean())

    @property
    def s_mean(self) -> float:
        return float(self.rows["budget"].mean(dtype=np.float64))

    @property
    def k_over_h(self) -> float:
        return float(self.test["budget"]["k_over_h"])

    @property
    def megaflops(self) -> float:
        return float(self.test["cost"]["flops_per_text"]) / 1e6


class Store:
    """The finished cells of a plan. `asked` holds every cell that was asked for, finished or not, by name.

    One that does not `read` takes no cell for finished: it only sees what is asked for.
    """

    def __init__(self, plan: Plan, *, read: bool = True) -> None:
        self.plan, self.read = plan, read
        self.asked: dict[str, Cell] = {}
        self._done: dict[str, Done] = {}

    @property
    def done(self) -> list[Done]:
        """The finished ones of all that were asked for."""
        return list(self._done.values())

    def get(self, cells: Sequence[Cell]) -> list[Done]:
        """Those of the cells that are finished, in order."""
        for cell in cells:
            assert self.asked.setdefault(cell.name, cell) == cell, f"two cells are named {cell.name}"
            if self.read and cell.name not in self._done and self.plan.done(cell):
                self._done[cell.name] = Done(cell, self.plan.cell(cell))
        return [self._done[cell.name] for cell in cells if cell.name in self._done]
