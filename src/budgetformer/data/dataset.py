"""A data source opened: task, labels, splits, warnings, and examples that stream from a spool."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.columns import choose_columns
from budgetformer.data.examples import UNLABELLED, BadRows, Example, Schema, read_examples
from budgetformer.data.locate import DataSource, locate, quarantine_file
from budgetformer.data.scan import Scan, Survey, peek, survey
from budgetformer.data.splits import Hashes, carve, overlap, subset
from budgetformer.data.spool import Spool
from budgetformer.errors import UsageError


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of a table: `index` are their numbers among its usable rows, `hashes` their `text_hash`es; `digest` is
    the whole table's."""

    name: str
    spool: Spool
    index: NDArray[np.int64]
    hashes: Hashes
    digest: str

    @property
    def rows(self) -> int:
        return len(self.index)

    def examples(self, rows: Sequence[int] | NDArray[np.int64] | None = None) -> Iterator[Example]:
        """Stream the examples, or those of these rows, always in the same order."""
        return self.spool.read(self.index if rows is None else self.index[np.asarray(rows, np.int64)])


class Texts(Iterable[str]):
    """The texts of a split, first and second, as often as they are asked for."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __iter__(self) -> Iterator[str]:
        return (text for e in self._split.examples() for text in (e.text, e.text_pair) if text is not None)


@dataclass(frozen=True)
class Leak:
    """How many `rows` of `split`, which are `of`, have a text that occurs in `other` too."""

    split: str
    other: str
    rows: int
    of: int

    def sentence(self) -> str:
        return f"{self.rows} of {self.of} {self.split} rows also occur in {self.other}"


@dataclass(frozen=True, eq=False)
class DataSet:
    """What training reads. `labels` are the classes in order (empty for regression); `digests` has, for each table
    that was read, what changes with its texts, labels and their order; `bad_rows` counts those set aside."""

    source: DataSource
    schema: Schema
    labels: list[str]
    splits: dict[str, Split]
    warnings: list[str]
    leaks: list[Leak]
    digests: dict[str, str]
    bad_rows: int

    @property
    def task(self) -> str:
        return str(self.schema.task)

    @property
    def columns_chosen(self) -> str:
        return self.schema.columns.sentence()

    @property
    def is_pair(self) -> bool:
        return self.schema.columns.text_pair is not None

    @property
    def fingerprint(self) -> str:
        """One digest of all tables."""
        digests = "".join(f"{name}:{digest}" for name, digest in sorted(self.digests.items()))
        return hashlib.sha256(digests.encode()).hexdigest()


def open_data(source: DataSource) -> DataSet:
    """Locate the data and read it once, streaming; raise DataError at what would spoil training."""
    result = survey(source, locate(source))
    return _data_set(source, result, _make_splits(source, result))


def open_labelled(source: DataSource, task: str, labels: list[str], split: str | None = None) -> DataSet:
    """All rows of one split of `source` under a trained model's labels: its test set, else validation, else the only
    table, which is a test set here. Nothing is carved out."""
    tables = locate(source)
    name = split or next(name for name in ("test", "validation", "train") if name in tables)
    if name not in tables:
        raise UsageError(f"{source.data} has no split {name!r}: it has {', '.join(tables)}")
    role = "test" if split is None else name
    result = survey(replace(source, task=task), {role: tables[name]}, labels)
    return _data_set(source, result, {role: _split(role, result.scans[role])})


def stream_examples(source: DataSource) -> Iterator[Example]:
    """The texts of `source.data` (a file, "-", or a data set's training rows), whose labels are not known."""
    table = locate(source)["train"]
    present = peek(table)[1]
    columns = choose_columns(present, table.name, text=source.text, text_pair=source.text_pair, need_label=False)
    yield from read_examples(table, Schema(columns), BadRows(source.bad_rows, quarantine_file(source)))


def find_leaks(hashes: Mapping[str, Hashes]) -> list[Leak]:
    """For any two splits, how many rows of the one occur in the other."""
    return [
        Leak(split, other, int(overlap(hashes[split], np.sort(hashes[other])).sum()), len(hashes[split]))
        for split, other in (("validation", "train"), ("test", "train"), ("test", "validation"))
        if split in hashes and other in hashes
    ]


def _data_set(source: DataSource, result: Survey, splits: dict[str, Split]) -> DataSet:
    same = "validation" if source.validation == "test" else None
    leaks = find_leaks({name: split.hashes for name, split in splits.items() if name != same})
    warnings = [*result.warnings, *(leak.sentence() for leak in leaks if leak.rows)]
    bad = sum((scanned.bad.counts for scanned in result.scans.values()), Counter[str]())
    del bad[UNLABELLED]
    if bad:
        kinds = ", ".join(f"{count} {kind}" for kind, count in bad.most_common())
        warnings.append(f"{bad.total()} bad rows set aside in {quarantine_file(source)} ({kinds})")
    return DataSet(
        source=source,
        schema=result.schema,
        labels=result.labels,
        splits=splits,
        warnings=warnings,
        leaks=[leak for leak in leaks if leak.rows],
        digests={name: scanned.digest for name, scanned in result.scans.items() if scanned.rows},
        bad_rows=bad.total(),
    )


def _make_splits(source: DataSource, result: Survey) -> dict[str, Split]:
    train = result.scans["train"]
    part = carve(train.hashes, train.strata, list(result.carved.values()), source.seed)
    rows = {name: np.flatnonzero(part == number) for number, name in enumerate(["train", *result.carved])}
    if source.limit is not None:
        rows["train"] = rows["train"][subset(train.strata[rows["train"]], source.limit, source.seed)]
    splits: dict[str, Split] = {}
    for name in ("train", "validation", "test"):
        if name in rows:
            splits[name] = _split(name, train, rows[name])
        elif name in result.scans and result.scans[name].rows:
            splits[name] = _split(name, result.scans[name])
    if source.validation == "test":
        splits["validation"] = replace(splits["test"], name="validation")
    return splits


def _split(name: str, scanned: Scan, rows: NDArray[np.int64] | None = None) -> Split:
    assert scanned.spool is not None
    rows = np.arange(scanned.rows) if rows is None else rows
    return Split(name, scanned.spool, rows, scanned.hashes[rows], scanned.digest)
