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

from budgetformer.paper.cells import Cell, Plan
from budgetformer.runs.files import read_json

_REMEDY = "delete the cell's directory and run again"


@dataclass(frozen=True)
class Done:
    """A finished cell: what its files say, each read when first wanted."""

    cell: Cell
    folder: Path

    @cached_property
    def rows(self) -> dict[str, NDArray[Any]]:
        """What happened on each test row: the arrays of outcome.npz."""
        with np.load(self.folder / "outcome.npz", allow_pickle=False) as file:
            return {name: file[name] for name in file.files}

    @cached_property
    def run(self) -> dict[str, Any]:
        return dict(read_json(self.folder / "run.json", _REMEDY))

    @cached_property
    def probes(self) -> dict[str, Any]:
        return dict(read_json(self.folder / "probes.json", _REMEDY))

    @cached_property
    def test(self) -> dict[str, Any]:
        """The evaluation on the test rows, as learned."""
        return dict(read_json(self.folder / "evaluation.json", _REMEDY)["test"])

    @cached_property
    def epochs(self) -> list[dict[str, Any]]:
        lines = (self.folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for line in lines if (record := json.loads(line))["kind"] == "epoch"]

    @cached_property
    def right(self) -> NDArray[np.bool_]:
        return np.asarray(self.rows["logits"].argmax(1) == self.rows["labels"])

    @property
    def accuracy(self) -> float:
        return float(self.right.mean())

    @property
    def soft_accuracy(self) -> float:
        return float((self.rows["soft_logits"].argmax(1) == self.rows["labels"]).mean())

    @property
    def s_mean(self) -> float:
        return float(self.rows["budget"].mean(dtype=np.float64))

    @property
    def k_over_h(self) -> float:
        return float(self.test["budget"]["k_over_h"])


class Store:
    """The finished cells of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._read: dict[str, Done] = {}

    def get(self, cells: Sequence[Cell]) -> list[Done]:
        """Those of the cells that are finished, in order."""
        for cell in cells:
            if cell.name not in self._read and self.plan.done(cell):
                self._read[cell.name] = Done(cell, self.plan.cell(cell))
        return [self._read[cell.name] for cell in cells if cell.name in self._read]
