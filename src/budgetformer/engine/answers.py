"""Scores -> the columns that predict adds to a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from budgetformer.engine.scorer import Scores
from budgetformer.errors import DataError, UsageError

PREFIX = "predicted_"
_DECIMALS = 6  # beyond them an answer depends on the other texts of its batch

Kind = str  # of a column's values: text, texts, number, numbers or flag


class Answers:
    """The columns of the answer in order: their kinds by name, and their values row by row.

    label and score (several of each for `top`; lists for multi-label; no label for regression), p_LABEL for each
    label if `probabilities`, heads (executed of all possible) and cut.
    """

    def __init__(self, task: str, labels: Sequence[str], *, top: int = 1, probabilities: bool = False) -> None:
        self.task, self.labels, self.top, self.probabilities = task, list(labels), top, probabilities
        single = task == "single_label_classification"
        if top != 1 and not single:
            raise UsageError(f"--top {top}: this run is not for one label of several: leave it out")
        if single and not 1 <= top <= len(labels):
            raise UsageError(f"--top {top}: the run has {len(labels)} labels: give a number from 1 to {len(labels)}")
        if probabilities and task == "regression":
            raise UsageError("--probabilities: a regression has none: leave it out")
        self.kinds: dict[str, Kind] = {}
        for place in range(1, top + 1):
            ending = "" if place == 1 else f"_{place}"
            if task != "regression":
                self.kinds[f"label{ending}"] = "text" if single else "texts"
            self.kinds[f"score{ending}"] = "numbers" if task.startswith("multi") else "number"
        self.kinds |= {f"p_{label}": "number" for label in labels if probabilities}
        self.kinds |= {"heads": "number", "cut": "flag"}

    def names(self, present: Sequence[str]) -> list[str]:
        """The columns' names beside those of the input: one that is taken gets a prefix."""
        names = [PREFIX + name if name in present else name for name in self.kinds]
        if taken := [name for name in names if name in present]:
            raise DataError(f"the input has the column {taken[0]!r}, which predict adds: rename it there")
        return names

    def rows(self, scores: Scores) -> Iterator[tuple[Any, ...]]:
        """The values, row by row, in the order of the names."""
        columns: list[list[Any]] = []
        exact = scores.probabilities.astype(np.float64)
        values = np.round(exact, _DECIMALS)
        if self.task == "regression":
            columns.append([float(f"{value:.{_DECIMALS}g}") for value in exact[:, 0]])
        elif self.task == "single_label_classification":
            best = np.argsort(-exact, axis=1, kind="stable")[:, : self.top]
            for place in best.T:
                columns.append([self.labels[label] for label in place])
                columns.append(values[np.arange(len(place)), place].tolist())
        else:
            above = [np.flatnonzero(row > 0.5) for row in exact]
            columns.append([[self.labels[label] for label in row] for row in above])
            columns.append([row[chosen].tolist() for row, chosen in zip(values, above, strict=True)])
        if self.probabilities:
            columns += values.T.tolist()
        columns += [np.round(scores.share.astype(np.float64), _DECIMALS).tolist(), scores.cut.tolist()]
        return zip(*columns, strict=True)
