"""One streaming pass over a table: what every split must know, in a dozen bytes a row."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.columns import Columns, choose_columns
from budgetformer.data.examples import BadRows, Example, LabelRule, infer_task, read_examples
from budgetformer.data.locate import DataSource
from budgetformer.data.sources import BadRow, RawRow, Table, columns_of
from budgetformer.data.splits import Hashes, pool_rare, quantile_bins, text_hash
from budgetformer.errors import DataError

MAX_CLASSES = 10_000


@dataclass(frozen=True)
class Reading:
    """How the rows of a data set are read."""

    columns: Columns
    rule: LabelRule

    def examples(self, table: Table, bad: BadRows) -> Iterator[Example]:
        return read_examples(table, self.columns, self.rule, bad)

    def knowing(self, labels: Iterable[str]) -> Reading:
        """The same for the other splits: a classification label outside of `labels` makes a bad row."""
        known = None if self.rule.task == "regression" else frozenset(labels)
        return replace(self, rule=replace(self.rule, known=known))


@dataclass(frozen=True)
class Scan:
    """A split in numbers. `counts` are rows by label, `strata` classes or quantile bins."""

    hashes: Hashes
    strata: NDArray[np.int32]
    counts: Mapping[str, int]
    digest: str

    @property
    def rows(self) -> int:
        return len(self.hashes)


def choose_reading(tables: Mapping[str, Table], source: DataSource) -> Reading:
    """Columns, task and label names, by the training table; the other tables must have the same columns."""
    train = tables["train"]
    columns = choose_columns(
        present_columns(train), train.name, text=source.text, text_pair=source.text_pair, label=source.label
    )
    for table in tables.values():
        choose_columns(present_columns(table), table.name, text=columns.text, text_pair=columns.text_pair,
                       label=",".join(columns.labels))  # fmt: skip
    task = source.task
    if task == "auto":
        rows = (row for row in train.rows() if isinstance(row, RawRow))
        task = infer_task(itertools.islice(rows, 1000), columns.labels, source.label_separator)
    if task != "multi" and len(columns.labels) > 1:
        raise DataError(f"{train.name}: several label columns make a multi-label task, not {task}: pass --task multi")
    names = train.label_names(columns.labels[0])
    return Reading(columns, LabelRule(task, source.label_separator, () if task == "regression" else names))


def present_columns(table: Table) -> list[str]:
    """The table's columns; DataError if it has no row that can be read."""
    columns = columns_of(table)
    if not columns:
        bad = next((row for row in table.rows() if isinstance(row, BadRow)), None)
        if bad:
            raise DataError(f"{bad.file}: no row can be read; line {bad.line}: {bad.reason}")
        raise DataError(f"{table.name}: the file has no rows: it needs a header line (or JSON objects) and data")
    return columns


def scan(examples: Iterable[Example], reading: Reading, name: str) -> Scan:
    """Read all examples once. Raises DataError if the labels are too many to be classes."""
    hashes, codes, values = array("Q"), array("i"), array("d")
    combinations: dict[object, int] = {}
    digest = hashlib.sha256()
    regression = reading.rule.task == "regression"
    for example in examples:
        text, pair, label = example.text, example.text_pair, example.label
        digest.update(f"{text}\x1e{pair or ''}\x1e{label}\x1d".encode("utf-8", "surrogatepass"))
        hashes.append(text_hash(text, pair))
        if regression:
            values.append(label)  # type: ignore[arg-type]
            continue
        codes.append(combinations.setdefault(label, len(combinations)))
        if reading.rule.task == "single" and len(combinations) > MAX_CLASSES:
            column = reading.columns.labels[0]
            raise DataError(
                f"{name}, line {example.line}: {column!r} has more than {MAX_CLASSES} different labels: "
                "is it the right column (--label), or a number (--task regression)?"
            )
    if regression:
        numbers = np.frombuffer(values, np.float64)
        if len(numbers) and numbers.min() == numbers.max():
            raise DataError(f"{name}: every label is {numbers[0]}: there is nothing to learn from one value")
        return Scan(np.frombuffer(hashes, np.uint64), quantile_bins(numbers), {}, digest.hexdigest())
    strata = np.frombuffer(codes, np.int32)
    counts = _label_counts(combinations, strata)
    strata = pool_rare(strata) if reading.rule.task == "multi" else strata
    return Scan(np.frombuffer(hashes, np.uint64), strata, counts, digest.hexdigest())


def _label_counts(combinations: Mapping[object, int], codes: NDArray[np.int32]) -> dict[str, int]:
    rows = np.bincount(codes, minlength=len(combinations))
    counts: dict[str, int] = {}
    for (label, _), number in zip(combinations.items(), rows, strict=True):
        for name in label if isinstance(label, tuple) else (str(label),):
            counts[name] = counts.get(name, 0) + int(number)
    return counts


def order_labels(counts: Mapping[str, int], reading: Reading, name: str) -> list[str]:
    """The classes in their order: as named, else by number if all are whole numbers, else by the alphabet.

    Raises DataError if there is nothing to tell apart.
    """
    rule = reading.rule
    if rule.task == "regression":
        return []
    if rule.task == "single" and len(counts) < 2:
        only = next(iter(counts), None)
        raise DataError(f"{name}: every row has the label {only!r}: training needs at least two classes")
    if not counts:
        raise DataError(f"{name}: no row has any label: check --label and --label-separator")
    if rule.names:
        return list(rule.names)
    if len(reading.columns.labels) > 1:
        return list(reading.columns.labels)
    try:
        return sorted(counts, key=lambda label: (int(label), label))
    except ValueError:
        return sorted(counts)
