"""One streaming pass over a table: its columns, its rows in numbers and in a spool, its labels in order."""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.examples import BadRows, Example, Schema, choose_columns, infer_task
from budgetformer.data.locate import DataSource, Table
from budgetformer.data.sources import RawRow
from budgetformer.data.splits import Hashes, pool_rare, quantile_bins, text_hash
from budgetformer.errors import DataError

MAX_CLASSES = 10_000
PEEK, PEEK_COLUMNS = 1000, 100  # rows by which the task and the columns are inferred


class Spool:
    """The usable rows of one table, one JSON array per line, in a temporary file: memory is bounded, and the user's
    file may change or go. It has no name: it goes with this object or, however the process ends, with the process."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._stream = tempfile.TemporaryFile(prefix="budgetformer-rows-", buffering=2**17)  # noqa: SIM115
        self._starts = array("Q", [0])

    def append(self, example: Example) -> None:
        row = json.dumps([example.line, example.text, example.text_pair, example.label], ensure_ascii=False)
        data = row.encode("utf-8", "surrogatepass") + b"\n"
        try:
            self._stream.write(data)
        except OSError as error:
            raise self._unusable(error) from None
        self._starts.append(self._starts[-1] + len(data))

    def read(self, rows: Iterable[int]) -> Iterator[Example]:
        """The rows of these numbers, from 0. Several readers may take turns."""
        for row in rows:
            start, end = self._starts[row], self._starts[row + 1]
            try:
                self._stream.seek(start)
                data = self._stream.read(end - start)
            except OSError as error:  # seeking writes what is still buffered
                raise self._unusable(error) from None
            line, text, pair, label = json.loads(data.decode("utf-8", "surrogatepass"))
            yield Example(text, pair, tuple(label) if isinstance(label, list) else label, line, self.file)

    def _unusable(self, error: OSError) -> DataError:
        folder = tempfile.gettempdir()
        return DataError(f"{self.file}: its rows cannot be kept in {folder} ({error.strerror}): set TMPDIR to another")


@dataclass(frozen=True)
class Scan:
    """A table in numbers, a dozen bytes per row; `counts` are rows by label, `strata` classes or quantile bins.

    `digest` changes with the texts, the labels and their order. The rows are in `spool`, if they were kept.
    """

    hashes: Hashes
    strata: NDArray[np.int32]
    counts: Mapping[str, int]
    digest: str
    bad: BadRows
    spool: Spool | None

    @property
    def rows(self) -> int:
        return len(self.hashes)


def choose_schema(tables: Mapping[str, Table], source: DataSource) -> Schema:
    """Columns, task and label names, by the first rows of the first table; the others must have the same columns."""
    first, *others = tables.values()
    rows, present = peek(first)
    columns = choose_columns(present, first.name, text=source.text, text_pair=source.text_pair, label=source.label)
    label = ",".join(columns.labels)
    for table in others:
        choose_columns(peek(table)[1], table.name, text=columns.text, text_pair=columns.text_pair, label=label)
    task = source.task
    if task == "auto":
        task = infer_task(rows, columns.labels, source.label_separator)
    if task != "multi" and len(columns.labels) > 1:
        raise DataError(f"{first.name}: several label columns make a multi-label task, not {task}: pass --task multi")
    names = () if task == "regression" else first.label_names(columns.labels[0])
    return replace(columns, task=task, separator=source.label_separator, names=names)


def peek(table: Table) -> tuple[list[RawRow], list[str]]:
    """The first rows that can be read, and their columns; DataError if there is none."""
    rows: list[RawRow] = []
    bad = None
    for row in table.rows():
        if isinstance(row, RawRow):
            rows.append(row)
        else:
            bad = bad or row
        if len(rows) == PEEK:
            break
    columns = list(dict.fromkeys(name for row in rows[:PEEK_COLUMNS] for name in row.fields))
    if columns:
        return rows, columns
    if bad:
        raise DataError(f"{bad.file}: no row can be read; line {bad.line}: {bad.reason}")
    raise DataError(f"{table.name}: the file has no rows: it needs a header line (or JSON objects) and data")


def scan(examples: Iterable[Example], schema: Schema, name: str, bad: BadRows, *, spooled: bool) -> Scan:
    """Read all examples once. Raises DataError if the labels are too many to be classes."""
    hashes, codes, values = array("Q"), array("i"), array("d")
    combinations: dict[object, int] = {}
    digest = hashlib.sha256()
    spool = Spool(name) if spooled else None
    for example in examples:
        text, pair, label = example.text, example.text_pair, example.label
        digest.update(f"{text}\x1e{pair or ''}\x1e{label}\x1d".encode("utf-8", "surrogatepass"))
        hashes.append(text_hash(text, pair))
        if spool:
            spool.append(example)
        if isinstance(label, float):
            values.append(label)
            continue
        codes.append(combinations.setdefault(label, len(combinations)))
        if schema.task == "single" and len(combinations) > MAX_CLASSES:
            raise DataError(
                f"{name}, line {example.line}: {schema.labels[0]!r} has more than {MAX_CLASSES} different "
                "labels: is it the right column (--label), or a number (--task regression)?"
            )
    strata = np.frombuffer(codes, np.int32)
    counts: Counter[str] = Counter()
    for names, rows in zip(combinations, np.bincount(strata, minlength=len(combinations)).tolist(), strict=True):
        counts.update(dict.fromkeys(names if isinstance(names, tuple) else (str(names),), rows))
    if schema.task == "multi":
        strata = pool_rare(strata)
    elif schema.task == "regression":
        numbers = np.frombuffer(values, np.float64)
        if len(numbers) and numbers.min() == numbers.max():
            raise DataError(f"{name}: every label is {numbers[0]}: there is nothing to learn from one value")
        strata = quantile_bins(numbers)
    return Scan(np.frombuffer(hashes, np.uint64), strata, counts, digest.hexdigest(), bad, spool)


def order_labels(counts: Mapping[str, int], schema: Schema, name: str) -> list[str]:
    """The classes in their order: as named, else by number if all are whole numbers, else by the alphabet.

    Raises DataError if there is nothing to tell apart.
    """
    if schema.task == "regression":
        return []
    if schema.task == "single" and len(counts) < 2:
        only = next(iter(counts), None)
        raise DataError(f"{name}: every row has the label {only!r}: training needs at least two classes")
    if not counts:
        raise DataError(f"{name}: no row has any label: check --label and --label-separator")
    if schema.names:
        return list(schema.names)
    if len(schema.labels) > 1:
        return list(schema.labels)
    try:
        return sorted(counts, key=lambda label: (int(label), label))
    except ValueError:
        return sorted(counts)
