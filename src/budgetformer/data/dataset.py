"""A data source opened: task, labels, splits, warnings, and examples that stream from disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.columns import choose_columns
from budgetformer.data.examples import BadRows, Example, read_examples
from budgetformer.data.locate import DataSource, locate
from budgetformer.data.scan import Reading, Scan, choose_reading, order_labels, present_columns, scan
from budgetformer.data.sources import Table
from budgetformer.data.splits import carve, overlap, subset
from budgetformer.errors import DataError

IMBALANCE = 10  # rows of the largest class to one of the smallest, from where on it is worth a warning


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of a table. `keep` says which of its usable rows belong here; None means all."""

    name: str
    rows: int
    table: Table
    reading: Reading
    keep: NDArray[np.bool_] | None = None

    def examples(self) -> Iterator[Example]:
        """Stream the examples from disk, always in the same order; DataError if the file has changed."""
        total = self.rows if self.keep is None else len(self.keep)
        number = -1
        for number, example in enumerate(self.reading.examples(self.table, BadRows("count"))):
            if number < total and (self.keep is None or self.keep[number]):
                yield example
        if number + 1 != total:
            raise DataError(f"{self.table.name}: had {total} usable rows, now {number + 1}: the file was changed")


@dataclass(frozen=True)
class Leak:
    """`rows` of `split` whose text occurs in `other` too."""

    split: str
    other: str
    rows: int


@dataclass(frozen=True, eq=False)
class DataSet:
    """What training reads. `labels` are the classes in order (empty for regression); `fingerprint` changes
    with the texts, labels and their order; `bad_rows` counts those set aside."""

    source: DataSource
    task: str
    labels: list[str]
    splits: dict[str, Split]
    columns_chosen: str
    is_pair: bool
    warnings: list[str]
    leaks: list[Leak]
    fingerprint: str
    bad_rows: int


def open_data(source: DataSource) -> DataSet:
    """Locate the data and read it once, streaming; raise DataError at what would spoil training."""
    tables = locate(source)
    reading = choose_reading(tables, source)
    bad = BadRows(source.bad_rows, _quarantine(source))
    scans = {"train": scan(reading.examples(tables["train"], bad), reading, tables["train"].name)}
    labels = order_labels(scans["train"].counts, reading, tables["train"].name)
    others = reading.knowing(labels)
    warnings: list[str] = []
    for name in [name for name in tables if name != "train"]:
        unlabelled = bad.unlabelled
        scans[name] = scan(others.examples(tables[name], bad), others, tables[name].name)
        if not scans[name].rows and bad.unlabelled > unlabelled:
            warnings.append(f"{tables[name].name} has no labels: it is left out")
            del tables[name], scans[name]
        elif not scans[name].rows:
            raise DataError(f"{tables[name].name}: no usable rows: give it some, or leave it out")
    splits, hashes = _make_splits(source, tables, scans, reading, others)
    leaks = _leaks(hashes)
    warnings += [*_label_warnings(scans["train"].counts, labels), *_row_warnings(bad)]
    warnings += [
        f"{leak.rows} of {splits[leak.split].rows} {leak.split} rows also occur in {leak.other}" for leak in leaks
    ]
    digest = hashlib.sha256("".join(f"{name}:{part.digest}" for name, part in sorted(scans.items())).encode())
    return DataSet(
        source=source,
        task=reading.rule.task,
        labels=labels,
        splits=splits,
        columns_chosen=reading.columns.sentence(),
        is_pair=reading.columns.text_pair is not None,
        warnings=warnings,
        leaks=leaks,
        fingerprint=digest.hexdigest(),
        bad_rows=bad.bad,
    )


def stream_examples(source: DataSource) -> Iterator[Example]:
    """The texts of `source.data` (a file, "-", or a data set's training rows), whose labels are not known."""
    table = locate(source)["train"]
    columns = choose_columns(
        present_columns(table), table.name, text=source.text, text_pair=source.text_pair, need_label=False
    )
    yield from read_examples(table, columns, None, BadRows(source.bad_rows, _quarantine(source)))


def _quarantine(source: DataSource) -> Path:
    name = "stdin" if source.data == "-" else Path(source.data.replace(":", "_")).name
    return Path(source.quarantine or f"{name}.bad.jsonl")


def _make_splits(
    source: DataSource,
    tables: Mapping[str, Table],
    scans: Mapping[str, Scan],
    reading: Reading,
    others: Reading,
) -> tuple[dict[str, Split], dict[str, NDArray[np.uint64]]]:
    train = scans["train"]
    fractions: dict[str, float] = {}
    if source.validation != "test" and "validation" not in scans:
        fractions["validation"] = source.validation_fraction
        if "test" not in scans and source.test_fraction:
            fractions["test"] = source.test_fraction
    part = carve(train.hashes, train.strata, list(fractions.values()), source.seed)
    keep = {name: part == number for number, name in enumerate(["train", *fractions])}
    for name, mask in keep.items():
        if not mask.any():
            raise DataError(
                f"{tables['train'].name}: {train.rows} rows are too few to carve out a {name} set of every class: "
                "add rows, or pass --validation and --test files"
            )
    if source.limit is not None:
        mine = np.flatnonzero(keep["train"])
        keep["train"] = np.zeros(train.rows, bool)
        keep["train"][mine[subset(train.strata[mine], source.limit, source.seed)]] = True
    splits, hashes = {}, {}
    for name in ("train", "validation", "test"):
        if name in keep:
            splits[name] = Split(name, int(keep[name].sum()), tables["train"], reading, keep[name])
            hashes[name] = train.hashes[keep[name]]
        elif name in scans and not (name == "validation" and source.validation == "test"):
            splits[name] = Split(name, scans[name].rows, tables[name], others)
            hashes[name] = scans[name].hashes
    if source.validation == "test":
        splits["validation"] = replace(splits["test"], name="validation")
    return splits, hashes


def _leaks(hashes: Mapping[str, NDArray[np.uint64]]) -> list[Leak]:
    leaks = []
    for split, other in (("validation", "train"), ("test", "train"), ("test", "validation")):
        if split in hashes and other in hashes:
            rows = int(overlap(hashes[split], np.sort(hashes[other])).sum())
            leaks += [Leak(split, other, rows)] if rows else []
    return leaks


def _label_warnings(counts: Mapping[str, int], labels: list[str]) -> list[str]:
    warnings = []
    missing = [label for label in labels if label not in counts]
    if missing:
        warnings.append(f"no training row has the label {', '.join(map(repr, missing[:5]))}")
    if counts:
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        if counts[most] > IMBALANCE * counts[least]:
            warnings.append(f"unbalanced: {most!r} has {counts[most]} training rows, {least!r} {counts[least]}")
    return warnings


def _row_warnings(bad: BadRows) -> list[str]:
    warnings = []
    if bad.bad:
        kinds = ", ".join(f"{count} {kind}" for kind, count in bad.counts.most_common() if kind != "unlabelled")
        warnings.append(f"{bad.bad} bad rows set aside in {bad.quarantine} ({kinds})")
    if bad.unlabelled:
        warnings.append(f"{bad.unlabelled} rows without a label (-1) were dropped")
    return warnings
