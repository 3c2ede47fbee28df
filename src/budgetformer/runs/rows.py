"""Rows for a run: which ones it was trained on, and which of a file it has not seen."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from budgetformer.data.dataset import DataSet, Split, open_data, open_labelled, stream_examples
from budgetformer.data.examples import Example
from budgetformer.data.locate import DataSource
from budgetformer.data.splits import Hashes, overlap, sample_rows, text_hash
from budgetformer.errors import DataError, UsageError
from budgetformer.runs.files import COPY_AGAIN, named_read_errors
from budgetformer.runs.record import TASKS

# The text hashes (uint64) of the rows that a run was trained on: `hashes`, and `unlabelled` where there were such.
TRAINING_ROWS = "training_rows.safetensors"
_TRAINED_ON = 0.5  # of a run's training rows: a file that holds so many of them is its training file, changed
_SOURCE = TypeAdapter(DataSource)
_COLUMNS = ("text", "text_pair", "label", "label_separator", "data_dir")  # the same for other rows, unless given


class HeldOut(NamedTuple):
    """Labelled rows for a run: one split of `data`. `notes` say what was left out, or should have been."""

    data: DataSet
    split: str
    notes: list[str]

    @property
    def rows(self) -> Split:
        return self.data.splits[self.split]

    def select(self, rows: NDArray[Any]) -> HeldOut:
        """These rows alone, by their numbers or by a mask."""
        return self._replace(data=replace(self.data, splits={self.split: self.rows.select(rows)}))

    def sample(self, limit: int | None) -> HeldOut:
        """At most so many of the rows, from all over the split."""
        count = self.rows.rows
        return self if limit is None or limit >= count else self.select(sample_rows(count, limit))


@dataclass(frozen=True)
class RunRows:
    """The data of a run, by its record. `exit_rule` says whether some of its validation rows were used for one."""

    folder: Path
    record: dict[str, Any]
    exit_rule: bool

    def held_out(
        self,
        source: DataSource | str | None = None,
        split: str | None = None,
        *,
        prefer: str = "test",
        unseen: bool = False,
    ) -> HeldOut:
        """Labelled rows that the run was not trained on, read as it read its own.

        Of the run's own data (None, or the same content under whatever name) the split `prefer` that was kept back;
        of a changed training file the rows that are new; of any other data all rows. With `unseen` no row that the
        model, or its exit rule, was fitted to.
        """
        if source is None:
            try:
                return self.training_data(prefer, unseen=unseen)
            except DataError as error:
                raise DataError(f"the run's own rows cannot be had ({error}): give labelled rows") from None
        asked = DataSource(source) if isinstance(source, str) else source
        rows = self.open_labelled(asked, split)
        if split is None and rows.rows.table.digest in (self.record.get("data_digests") or {}).values():
            with suppress(DataError):
                return self.training_data(prefer, asked, unseen=unseen)
        return self._without_training_rows(rows, drop=split is None, always=unseen)

    @cached_property
    def source(self) -> DataSource:
        """What the run was trained on; standard input where it does not say."""
        with named_read_errors(self.folder / "run.json", COPY_AGAIN):
            source = _SOURCE.validate_python({"data": "-", **(self.record.get("data") or {})})
            path = self.record.get("data_path")  # for whoever works in another directory than the one that trained
            return replace(source, data=path) if isinstance(path, str) and not Path(source.data).exists() else source

    def open_labelled(self, source: DataSource, split: str | None = None) -> HeldOut:
        """All rows of one split, read with the run's columns, task and labels."""
        task = {long: short for short, long in TASKS.items()}[self.record["task"]]
        data = open_labelled(self.in_columns(source), task, self.record["labels"], split)
        return HeldOut(data, next(iter(data.splits)), data.warnings)

    def training_data(self, prefer: str, place: DataSource | None = None, *, unseen: bool = False) -> HeldOut:
        """A split of the data that the run was trained on, now at `place`; DataError says why it cannot be had."""
        source = replace(self.source, offline=True)
        if place is not None:
            source = replace(source, data=place.data, data_dir=place.data_dir or source.data_dir)
        if source.data == "-":
            raise DataError("they came from standard input")
        try:
            data = open_data(source)
        except UsageError as error:
            raise DataError(str(error)) from None
        if data.digests != self.record["data_digests"]:
            raise DataError(f"{source.data} has changed since")
        rows = HeldOut(data, prefer if prefer in data.splits else "validation", data.warnings)
        if not unseen or rows.split != "validation" or not self.exit_rule:
            return rows
        note = "the exit rule was fitted to every other validation row: the rest is used"
        return rows.select(np.arange(1, rows.rows.rows, 2))._replace(notes=[*rows.notes, note])

    def unlabelled(self, source: DataSource) -> tuple[list[Example], list[str]]:
        """The texts of a file whose labels are not known, but for those that the run was trained on; and a note."""
        examples = list(stream_examples(self.in_columns(source)))
        hashes = np.array([text_hash(example.text, example.text_pair) for example in examples], np.uint64)
        if not (seen := overlap(hashes, self._training_hashes[1])).any():
            return examples, []
        note = _left_out(seen, source.data)
        return [example for example, known in zip(examples, seen.tolist(), strict=True) if not known], [note]

    @property
    def _training_hashes(self) -> tuple[Hashes, Hashes]:
        """The `text_hash` of each labelled training row, and of all, sorted; none for a run that does not say."""
        if not (file := self.folder / TRAINING_ROWS).exists():
            return (none := np.zeros(0, np.uint64)), none
        from safetensors.numpy import load_file

        with named_read_errors(file, COPY_AGAIN):
            saved = load_file(file)
            every = [hashes.astype(np.uint64) for hashes in saved.values()]
            return np.sort(saved["hashes"].astype(np.uint64)), np.sort(np.concatenate(every))

    def _without_training_rows(self, held_out: HeldOut, *, drop: bool, always: bool = False) -> HeldOut:
        hashes, (labelled, trained) = held_out.rows.hashes, self._training_hashes
        if not (seen := overlap(hashes, trained)).any():
            return held_out
        if always or (drop and overlap(np.unique(labelled), np.sort(hashes)).mean() >= _TRAINED_ON):
            note = _left_out(seen, held_out.data.source.data)
            return held_out.select(~seen)._replace(notes=[*held_out.notes, note])
        return held_out._replace(notes=[*held_out.notes, _seen(seen)])

    def in_columns(self, source: DataSource) -> DataSource:
        """A source read in the columns that the run was trained on, unless it names others."""
        return replace(source, **{key: getattr(source, key) or getattr(self.source, key) for key in _COLUMNS})


def _seen(seen: NDArray[np.bool_]) -> str:
    return f"{int(seen.sum())} of {len(seen)} rows were seen in training"


def _left_out(seen: NDArray[np.bool_], where: str) -> str:
    """What is said of rows that are left out; an error where none is left."""
    if seen.all():
        raise DataError(f"{where}: all of its {len(seen)} rows were seen in training: give others")
    return f"{_seen(seen)} and are left out"
