"""Labelled data for a model that is trained already: its labels are given, and nothing is carved out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from budgetformer.data.dataset import DataSet, Split
from budgetformer.data.examples import BadRows
from budgetformer.data.locate import DataSource, locate
from budgetformer.data.scan import choose_reading, scan
from budgetformer.errors import DataError, UsageError


def open_held_out(source: DataSource, task: str, labels: list[str], split: str | None = None) -> DataSet:
    """All rows of one split of `source` under the model's labels: its test set, else validation, else the only file."""
    tables = locate(source)
    name = split or next(name for name in ("test", "validation", "train") if name in tables)
    if name not in tables:
        raise UsageError(f"{source.data} has no split {name!r}: it has {', '.join(tables)}")
    table = tables[name]
    reading = choose_reading({"train": table}, replace(source, task=task)).knowing(labels)
    bad = BadRows(source.bad_rows, Path(source.quarantine or f"{Path(table.name).name}.bad.jsonl"))
    scanned = scan(reading.examples(table, bad), reading, table.name)
    if not scanned.rows:
        raise DataError(f"{table.name}: no usable rows: give labelled rows to evaluate on")
    return DataSet(
        source=source,
        task=task,
        labels=labels,
        splits={name: Split(name, scanned.rows, table, reading)},
        columns_chosen=reading.columns.sentence(),
        is_pair=reading.columns.text_pair is not None,
        warnings=[f"{bad.bad} bad rows set aside"] if bad.bad else [],
        leaks=[],
        fingerprint=scanned.digest,
        bad_rows=bad.bad,
    )
