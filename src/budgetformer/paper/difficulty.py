"""How hard a test row is: by how far people agree on it (SNLI), or by the loss of dense models that never saw it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.locate import locate
from budgetformer.data.sources import BadRow, FileTable
from budgetformer.errors import DataError
from budgetformer.paper.cells import Plan
from budgetformer.paper.statistics import thirds
from budgetformer.paper.store import Done

GRADES = ("Simple", "Hard", "Very hard")


@dataclass(frozen=True)
class Grading:
    """Test rows by difficulty: a figure that grows with it, and a grade from 0 to 2. NaN and -1 are not graded."""

    words: str
    difficulty: NDArray[np.float64]
    grade: NDArray[np.int64]


def gradings(plan: Plan, dataset: str, dense: Sequence[Done]) -> list[Grading]:
    """The gradings of a data set's test rows, people's first; none without dense cells."""
    if not dense:
        return []
    # Test rows: no dense model was trained on them, so no loss is low because its row was learned by heart.
    losses = np.mean([done.rows["losses"] for done in dense], axis=0)
    by_loss = Grading("thirds of the dense models' loss", losses, thirds(losses))
    if dataset != "snli" or not (agreement := annotators_agreement(plan)):
        return [by_loss]
    values = np.array([agreement.get(int(line), np.nan) for line in dense[0].rows["lines"]])
    grade = np.select([values > 0.9, values > 0.7, values > 0], [0, 1, 2], -1)
    return [Grading("annotators' disagreement", 1 - values, grade), by_loss]


def annotators_agreement(plan: Plan) -> dict[int, float]:
    """The share of annotators who chose the majority label, by the line of a SNLI test row; empty if unknown.

    It is read from the test rows themselves if they have `annotator_labels`, or from a file beside them,
    test_annotators.jsonl (also .gz, .xz), with a row for each test row.
    """
    table = locate(plan.source("snli"))["test"]
    rows = [row for row in table.rows() if not isinstance(row, BadRow)]
    if rows and "annotator_labels" in rows[0].fields:
        return {row.line: share for row in rows if (share := _majority(row.fields["annotator_labels"]))}
    files = Path(table.path).parent.glob("test_annotators.jsonl*") if isinstance(table, FileTable) else ()
    if (path := min(files, default=None)) is None:
        return {}
    beside = [row for row in FileTable(path, str(path)).rows() if not isinstance(row, BadRow)]
    if len(beside) != len(rows):
        counts = f"{len(beside)} rows for the {len(rows)} rows of {table.name}"
        raise DataError(f"{path}: has {counts}: they must correspond")
    both = zip(rows, beside, strict=True)
    return {row.line: share for row, other in both if (share := _majority(other.fields.get("annotator_labels")))}


def _majority(labels: Any) -> float | None:
    votes = [label for label in labels or () if label not in (None, "", "-", -1)]
    return Counter(votes).most_common(1)[0][1] / len(votes) if len(votes) > 1 else None
