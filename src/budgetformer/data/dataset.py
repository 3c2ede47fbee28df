"""A data source opened: task, labels, splits, warnings, and examples that stream from a spool."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.examples import UNLABELLED, BadRows, Example, Schema, choose_columns, read_examples
from budgetformer.data.locate import DataSource, Table, choose_split, locate, quarantine_file
from budgetformer.data.scan import Scan, choose_schema, order_labels, peek, scan
from budgetformer.data.splits import Hashes, carve, overlap, part_sizes, subset, text_hash
from budgetformer.errors import DataError

IMBALANCE = 10  # rows of the largest class to one of the smallest, from where on it is worth a warning
STRATA = {"single": "classes", "multi": "combinations of labels", "regression": "ranges of values"}

Watch = Callable[[str, Iterator[Example]], Iterator[Example]]


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of a table that was read: `index` are their numbers among its usable rows."""

    name: str
    table: Scan
    index: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.index)

    @property
    def hashes(self) -> Hashes:
        """The `text_hash` of each row."""
        return self.table.hashes[self.index]

    def select(self, rows: Sequence[int] | NDArray[Any]) -> Split:
        """These rows alone, by their numbers in the split or by a mask."""
        return replace(self, index=self.index[np.asarray(rows) if len(rows) else np.zeros(0, np.int64)])

    def examples(self) -> Iterator[Example]:
        """Stream the examples, always in the same order."""
        assert self.table.spool is not None
        return self.table.spool.read(self.index)


@dataclass(frozen=True)
class Texts(Iterable[str]):
    """The texts of a split, first and second, as often as they are asked for."""

    split: Split

    def __iter__(self) -> Iterator[str]:
        return (text for e in self.split.examples() for text in (e.text, e.text_pair) if text is not None)


class Leak(NamedTuple):
    """How many `rows` of `split`, which are `of`, have a text that occurs in `other` too."""

    split: str
    other: str
    rows: int
    of: int

    def sentence(self) -> str:
        return f"{self.rows} of {self.of} {self.split} rows also occur in {self.other}"


@dataclass(frozen=True, eq=False)
class DataSet:
    """A source, read. `labels` are the classes in order (empty for regression), `scans` the tables in numbers;
    `errors` is what would stop training, empty if such things are raised."""

    source: DataSource
    schema: Schema
    labels: list[str]
    scans: dict[str, Scan]
    errors: list[str]
    warnings: list[str]
    splits: dict[str, Split] = field(default_factory=dict)
    leaks: list[Leak] = field(default_factory=list)

    @property
    def task(self) -> str:
        return str(self.schema.task)

    @property
    def columns_chosen(self) -> str:
        return self.schema.sentence()

    @property
    def is_pair(self) -> bool:
        return self.schema.text_pair is not None

    @property
    def digests(self) -> dict[str, str]:
        """For each table, what changes with its texts, labels and their order."""
        return {name: scanned.digest for name, scanned in self.scans.items() if scanned.rows}

    @property
    def fingerprint(self) -> str:
        """One digest of all tables."""
        digests = "".join(f"{name}:{digest}" for name, digest in sorted(self.digests.items()))
        return hashlib.sha256(digests.encode()).hexdigest()


def open_data(source: DataSource) -> DataSet:
    """Locate the data and read it once, streaming; raise DataError at what would spoil training."""
    data = read_tables(source, locate(source))
    train, carved = data.scans["train"], _carved(source, data.scans)
    part = carve(train.hashes, train.strata, list(carved.values()), source.seed)
    rows = {name: np.flatnonzero(part == number) for number, name in enumerate(["train", *carved])}
    if source.limit is not None:
        rows["train"] = rows["train"][subset(train.strata[rows["train"]], source.limit, source.seed)]
    splits = {name: Split(name, train, index) for name, index in rows.items()}
    for name, scanned in data.scans.items():
        if name not in splits and scanned.rows:
            splits[name] = Split(name, scanned, np.arange(scanned.rows))
    if source.validation == "test":
        splits["validation"] = replace(splits["test"], name="validation")
    return _with_splits(data, splits)


def open_labelled(source: DataSource, task: str, labels: list[str], split: str | None = None) -> DataSet:
    """All rows of one split of `source` under a trained model's labels: its test set, else validation, else the only
    table, which is a test set here. Nothing is carved out."""
    tables = locate(source)
    name = choose_split(tables, split, source.data)
    role = "test" if split is None and len(tables) == 1 else name
    data = read_tables(replace(source, task=task), {role: tables[name]}, labels)
    return _with_splits(data, {role: Split(role, data.scans[role], np.arange(data.scans[role].rows))})


def stream_examples(source: DataSource, bad: BadRows | None = None) -> Iterator[Example]:
    """The texts of `source.data` (a file, "-", or a data set's training rows), whose labels are not known."""
    bad = bad or BadRows(source.bad_rows, quarantine_file(source))
    table = locate(source)["train"]
    present = peek(table)[1]
    schema = choose_columns(present, table.name, text=source.text, text_pair=source.text_pair, need_label=False)
    yield from read_examples(table.rows(), schema, bad)


def stream_unlabelled(data: DataSet, warn: Callable[[str], object] = lambda warning: None) -> Iterator[Example]:
    """The texts of `source.unlabelled` that are in no split of the data, in the same columns.

    At the end `warn` is told of the bad rows among them.
    """
    schema, source = data.schema, data.source
    assert source.unlabelled is not None
    known = set(np.concatenate([split.hashes for split in data.splits.values()]).tolist())
    aside = quarantine_file(source).with_suffix(".unlabelled.jsonl")  # beside the training file's bad rows
    place, bad = replace(source, data=source.unlabelled, validation=None, test=None), BadRows(source.bad_rows, aside)
    for example in stream_examples(replace(place, text=schema.text, text_pair=schema.text_pair), bad):
        if text_hash(example.text, example.text_pair) not in known:
            yield example
    if bad.bad:
        warn(_set_aside(bad.counts, aside))


def _set_aside(bad: Counter[str], quarantine: Path) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in bad.most_common())
    return f"{bad.total()} bad rows set aside in {quarantine} ({kinds})"


def read_tables(
    source: DataSource, tables: Mapping[str, Table], labels: list[str] | None = None, watch: Watch | None = None
) -> DataSet:
    """Read every table once. The first one's labels are all that the others may have, unless `labels` are given.

    The rows are spooled and the first problem is raised as DataError; but with `watch`, through which the examples
    of each table pass, nothing is kept or written, and problems are collected. Splits are made elsewhere.
    """
    errors: list[str] = []
    warnings: list[str] = []
    scans: dict[str, Scan] = {}

    def problem(message: str) -> None:
        if watch is None:
            raise DataError(message)
        errors.append(message)

    schema, training = choose_schema(tables, source), labels is None
    schema = schema if labels is None else schema.with_labels(labels)
    for name, table in tables.items():
        append = any(scanned.bad.bad for scanned in scans.values())
        bad = BadRows("count") if watch else BadRows(source.bad_rows, quarantine_file(source), append=append)
        examples = read_examples(table.rows(), schema, bad)
        scanned = scan(watch(name, examples) if watch else examples, schema, table.name, bad, spooled=not watch)
        if not scanned.rows and bad.unlabelled and scans:
            warnings.append(f"{table.name} has no labels: it is left out")
        elif not scanned.rows:
            problem(f"{table.name}: no usable rows: give it labelled rows, or leave it out")
        elif training and not scans:
            try:
                labels = order_labels(scanned.counts, schema, table.name)
                schema = schema.with_labels(labels)
            except DataError as error:
                problem(str(error))
        if watch and bad.bad and source.bad_rows == "error":
            problem(f"{table.name}: {bad.bad} bad rows: fix them or pass --bad-rows skip")
        scans[name] = scanned
    if training and scans["train"].rows and (cause := _cannot_carve(source, scans, str(schema.task))):
        problem(f"{tables['train'].name}: {cause}, or pass --validation and --test files")
    warnings += _warnings(scans, labels or [] if training else [], None if watch else quarantine_file(source))
    return DataSet(source, schema, labels or [], scans, errors, warnings)


def find_leaks(hashes: Mapping[str, Hashes]) -> list[Leak]:
    """For any two splits, how many rows of the one occur in the other."""
    return [
        Leak(split, other, int(overlap(hashes[split], np.sort(hashes[other])).sum()), len(hashes[split]))
        for split, other in (("validation", "train"), ("test", "train"), ("test", "validation"))
        if split in hashes and other in hashes
    ]


def _warnings(scans: Mapping[str, Scan], labels: list[str], quarantine: Path | None) -> list[str]:
    """What is odd about the labels of the training rows, where they are to be judged, and about rows left out."""
    warnings, counts = [], next(iter(scans.values())).counts
    if missing := [label for label in labels if label not in counts]:
        warnings.append(f"no training row has the label {', '.join(map(repr, missing[:5]))}")
    if labels and counts:
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        if counts[most] > IMBALANCE * counts[least]:
            warnings.append(f"unbalanced: {most!r} has {counts[most]} training rows, {least!r} {counts[least]}")
    bad = sum((scanned.bad.counts for scanned in scans.values()), Counter[str]())
    if unlabelled := bad.pop(UNLABELLED, 0):
        warnings.append(f"{unlabelled} rows without a label (-1) were dropped")
    if bad and quarantine:
        warnings.append(_set_aside(bad, quarantine))
    return warnings


def _carved(source: DataSource, scans: Mapping[str, Scan]) -> dict[str, float]:
    """The splits that nobody gave, and the share of the training rows that each gets."""
    present = [name for name, scanned in scans.items() if scanned.rows]
    if source.validation == "test" or "validation" in present:
        return {}
    test = {} if "test" in present or not source.test_fraction else {"test": source.test_fraction}
    return {"validation": source.validation_fraction, **test}


def _cannot_carve(source: DataSource, scans: Mapping[str, Scan], task: str) -> str:
    """Why some of the splits would be empty; nothing if none would. Duplicates stay together, and every stratum
    keeps a text for training."""
    train, carved = scans["train"], _carved(source, scans)
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
        reserved = f"each of the {strata} {STRATA[task]} keeps a text for training"
        return f"{train.rows} rows leave too few to {sets}, for {reserved}: add rows to them"
    return f"{train.rows} rows are too few to {sets}: add rows"


def _with_splits(data: DataSet, splits: dict[str, Split]) -> DataSet:
    same = "validation" if data.source.validation == "test" else None
    leaks = find_leaks({name: split.hashes for name, split in splits.items() if name != same})
    leaks = [leak for leak in leaks if leak.rows]
    return replace(data, splits=splits, leaks=leaks, warnings=[*data.warnings, *(leak.sentence() for leak in leaks)])
