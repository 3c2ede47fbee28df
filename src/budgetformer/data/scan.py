"""One streaming pass over each table of a source: columns, rows, labels, and what would spoil training."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.columns import choose_columns
from budgetformer.data.examples import BadRows, Example, Schema, infer_task, read_examples
from budgetformer.data.locate import DataSource, quarantine_file
from budgetformer.data.sources import RawRow, Table
from budgetformer.data.splits import Hashes, part_sizes, pool_rare, quantile_bins, text_hash
from budgetformer.data.spool import Spool
from budgetformer.errors import DataError

MAX_CLASSES = 10_000
IMBALANCE = 10  # rows of the largest class to one of the smallest, from where on it is worth a warning
PEEK, PEEK_COLUMNS = 1000, 100  # rows by which the task and the columns are inferred
STRATA = {"single": "classes", "multi": "combinations of labels", "regression": "ranges of values"}

Watch = Callable[[str, Iterator[Example]], Iterator[Example]]


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


@dataclass
class Survey:
    """All tables of a source, scanned. `carved` are the splits to take from the training rows, with their shares;
    `errors` is what would stop training, empty if such things are raised."""

    schema: Schema
    labels: list[str]
    scans: dict[str, Scan] = field(default_factory=dict)
    carved: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def survey(
    source: DataSource, tables: Mapping[str, Table], labels: list[str] | None = None, watch: Watch | None = None
) -> Survey:
    """Read every table once. The first one's labels are all that the others may have, unless `labels` are given.

    The rows are spooled and the first problem is raised as DataError; but with `watch`, through which the examples
    of each table pass, nothing is kept or written, and problems are collected.
    """
    result = Survey(choose_schema(tables, source), labels or [])
    if labels is not None:
        result.schema = result.schema.with_labels(labels)

    def problem(message: str) -> None:
        if watch is None:
            raise DataError(message)
        result.errors.append(message)

    for name, table in tables.items():
        append = any(scanned.bad.bad for scanned in result.scans.values())
        bad = BadRows("count") if watch else BadRows(source.bad_rows, quarantine_file(source), append=append)
        examples = read_examples(table, result.schema, bad)
        scanned = scan(watch(name, examples) if watch else examples, result.schema, table.name, bad, spooled=not watch)
        if not scanned.rows and bad.unlabelled and result.scans:
            result.warnings.append(f"{table.name} has no labels: it is left out")
        elif not scanned.rows:
            problem(f"{table.name}: no usable rows: give it labelled rows, or leave it out")
        elif labels is None and not result.scans:
            try:
                result.labels = order_labels(scanned.counts, result.schema, table.name)
                result.schema = result.schema.with_labels(result.labels)
                result.warnings += _label_warnings(scanned.counts, result.labels)
            except DataError as error:
                problem(str(error))
        if watch and bad.bad and source.bad_rows == "error":
            problem(f"{table.name}: {bad.bad} bad rows: fix them or pass --bad-rows skip")
        result.scans[name] = scanned
    if unlabelled := sum(scanned.bad.unlabelled for scanned in result.scans.values()):
        result.warnings.append(f"{unlabelled} rows without a label (-1) were dropped")
    train = result.scans.get("train")
    if labels is None and train and train.rows:
        result.carved = _carved(source, [name for name, scanned in result.scans.items() if scanned.rows])
        if cause := _cannot_carve(train, result.carved, str(result.schema.task)):
            problem(f"{tables['train'].name}: {cause}, or pass --validation and --test files")
    return result


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
    names = first.label_names(columns.labels[0])
    return Schema(columns, task, source.label_separator, () if task == "regression" else names)


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
                f"{name}, line {example.line}: {schema.columns.labels[0]!r} has more than {MAX_CLASSES} different "
                "labels: is it the right column (--label), or a number (--task regression)?"
            )
    strata = np.frombuffer(codes, np.int32)
    counts = _label_counts(combinations, strata)
    if schema.task == "multi":
        strata = pool_rare(strata)
    elif schema.task == "regression":
        numbers = np.frombuffer(values, np.float64)
        if len(numbers) and numbers.min() == numbers.max():
            raise DataError(f"{name}: every label is {numbers[0]}: there is nothing to learn from one value")
        strata = quantile_bins(numbers)
    return Scan(np.frombuffer(hashes, np.uint64), strata, counts, digest.hexdigest(), bad, spool)


def _label_counts(combinations: Mapping[object, int], codes: NDArray[np.int32]) -> dict[str, int]:
    rows = np.bincount(codes, minlength=len(combinations))
    counts: dict[str, int] = {}
    for label, number in zip(combinations, rows, strict=True):
        for name in label if isinstance(label, tuple) else (str(label),):
            counts[name] = counts.get(name, 0) + int(number)
    return counts


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
    if len(schema.columns.labels) > 1:
        return list(schema.columns.labels)
    try:
        return sorted(counts, key=lambda label: (int(label), label))
    except ValueError:
        return sorted(counts)


def _label_warnings(counts: Mapping[str, int], labels: list[str]) -> list[str]:
    warnings = []
    if missing := [label for label in labels if label not in counts]:
        warnings.append(f"no training row has the label {', '.join(map(repr, missing[:5]))}")
    if counts:
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        if counts[most] > IMBALANCE * counts[least]:
            warnings.append(f"unbalanced: {most!r} has {counts[most]} training rows, {least!r} {counts[least]}")
    return warnings


def _carved(source: DataSource, present: list[str]) -> dict[str, float]:
    """The splits that nobody gave, and the share of the training rows that each gets."""
    if source.validation == "test" or "validation" in present:
        return {}
    test = {} if "test" in present or not source.test_fraction else {"test": source.test_fraction}
    return {"validation": source.validation_fraction, **test}


def _cannot_carve(train: Scan, carved: Mapping[str, float], task: str) -> str:
    """Why some of the splits would be empty; nothing if none would. Duplicates stay together, and every stratum
    keeps a text for training."""
    first = np.unique(train.hashes, return_index=True)[1]
    texts, strata = len(first), len(np.unique(train.strata[first]))

    def enough(texts: int, strata: int) -> bool:
        return all(part_sizes(texts, strata, list(carved.values())))

    if enough(texts, strata):
        return ""
    sets = "carve out " + " and ".join(f"a {name} set" for name in carved)
    if enough(train.rows, strata):
        return f"{train.rows} rows hold only {texts} different texts, too few to {sets}: add texts"
    if enough(texts, 1):
        kept = f"each of the {strata} {STRATA[task]} keeps a text for training"
        return f"{train.rows} rows leave too few to {sets}, for {kept}: add rows to them"
    return f"{train.rows} rows are too few to {sets}: add rows"
