"""Scores -> answers: one choice of labels, one threshold and one rounding for every verb.

Shapes: T texts, C outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.engine.scores import Scores, cost_shares
from budgetformer.errors import DataError, UsageError
from budgetformer.spec import ModelSpec

PREFIX = "predicted_"
THRESHOLD = 0.5  # a label of several is answered where its probability is above
DECIMALS = 6  # beyond them an answer depends on the other texts of its batch

Kind = str  # of a column's values: text, texts, number, numbers or flag


def predicted(probabilities: NDArray[np.float32], task: str) -> NDArray[Any]:
    """The answers: class numbers (T,), truth values (T, C) or numbers (T,)."""
    if task == "regression":
        return probabilities[:, 0]
    return probabilities > THRESHOLD if task == "multi_label_classification" else probabilities.argmax(1)


def rounded(values: NDArray[np.float32], task: str) -> NDArray[np.float64]:
    """Probabilities to so many decimals, a regression's values to so many digits."""
    exact = values.astype(np.float64)
    if task == "regression":
        return np.array([float(f"{value:.{DECIMALS}g}") for value in exact.flat]).reshape(exact.shape)
    return np.round(exact, DECIMALS)


def named(probabilities: NDArray[np.float32], task: str, labels: Sequence[str]) -> list[Any]:
    """Each text's answer as a user reads it: a label, a list of labels or a number."""
    chosen = predicted(probabilities, task)
    if task == "regression":
        return [float(value) for value in rounded(probabilities, task)[:, 0]]
    if task == "multi_label_classification":
        return [[labels[label] for label in np.flatnonzero(row).tolist()] for row in chosen]
    return [labels[label] for label in chosen.tolist()]


class Columns:
    """The columns that predict adds: their kinds by name, and their values row by row.

    label and score (several of each for `top`; lists for multi-label; no label for regression), p_LABEL for each
    label if `probabilities`, heads (executed of all possible) and cut; of a model with exits the stage at which a text
    left and its cost, as a share of the dense model's.
    """

    def __init__(self, config: ModelSpec, labels: Sequence[str], *, top: int = 1, probabilities: bool = False) -> None:
        self.config, task = config, config.task
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
        self.kinds |= {"exit": "text", "cost": "number"} if config.exits else {}

    def names(self, present: Sequence[str]) -> list[str]:
        """The columns' names beside those of the input: one that is taken gets a prefix."""
        names = [PREFIX + name if name in present else name for name in self.kinds]
        if taken := [name for name in names if name in present]:
            raise DataError(f"the input has the column {taken[0]!r}, which predict adds: rename it there")
        return names

    def rows(self, scores: Scores) -> Iterator[tuple[Any, ...]]:
        """The values, row by row, in the order of the names."""
        columns: list[list[Any]] = []
        values = rounded(scores.probabilities, self.task)
        answers = named(scores.probabilities, self.task, self.labels)
        if self.task == "regression":
            columns.append(answers)
        elif self.task == "single_label_classification":
            for place in ranking(scores.probabilities)[:, : self.top].T:
                columns.append([self.labels[label] for label in place])
                columns.append(values[np.arange(len(place)), place].tolist())
        else:
            chosen = predicted(scores.probabilities, self.task)
            columns.append(answers)
            columns.append([row[mask].tolist() for row, mask in zip(values, chosen, strict=True)])
        if self.probabilities:
            columns += values.T.tolist()
        columns += [np.round(scores.head_share.astype(np.float64), DECIMALS).tolist(), scores.table.truncated.tolist()]
        if self.config.exits:
            names, costs = self.config.stages.names, cost_shares(scores, self.config).astype(np.float64)
            columns += [[names[stage] for stage in scores.exits_per_text], np.round(costs, DECIMALS).tolist()]
        return zip(*columns, strict=True)


def ranking(probabilities: NDArray[np.float32]) -> NDArray[np.int64]:
    """The labels of each text, likeliest first; of equals, the first label wins. (T, C)."""
    return np.argsort(-probabilities.astype(np.float64), axis=1, kind="stable")
