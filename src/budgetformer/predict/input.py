"""What predict reads: files, folders and data sets row by row with all their fields, in windows.

Where a window ends depends on the rows alone, so a resumed run and every shard cut the same windows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from budgetformer.data.columns import Columns, choose_columns
from budgetformer.data.examples import BadRows, Example, Schema, read_examples
from budgetformer.data.files import DAMAGED, open_bytes
from budgetformer.data.locate import DataSource, locate
from budgetformer.data.named import HubTable
from budgetformer.data.scan import peek
from budgetformer.data.sources import FORMATS, BadRow, FileTable, RawRow, Table, sniff
from budgetformer.errors import DataError, UsageError

WINDOW_ROWS, WINDOW_CHARS = 4096, 2**23


class Window(NamedTuple):
    """Rows that are scored together; `end` is how many of the input's rows were read when it was full."""

    rows: list[Example]
    end: int


@dataclass(frozen=True)
class Input:
    """The tables to score, one after the other; `wanted` is the range of their rows, bad ones counted too."""

    tables: list[Table]
    present: list[str]
    columns: Columns
    bad: BadRows
    wanted: range

    def windows(self, done: int = 0) -> Iterator[Window]:
        """The windows after the first `done` rows; rows before are checked again, so that bad ones are set aside."""
        rows, chars, last = list[Example](), 0, 0
        for number, example in self._examples():
            if number <= done:
                continue
            size = sum(len(value) for value in example.fields.values() if isinstance(value, str))
            next_block = (number - 1) // WINDOW_ROWS != (last - 1) // WINDOW_ROWS
            if rows and (next_block or chars + size > WINDOW_CHARS):
                yield Window(rows, last)
                rows, chars = [], 0
            rows.append(example)
            chars, last = chars + size, number
        if rows:
            yield Window(rows, last)

    def _examples(self) -> Iterator[tuple[int, Example]]:
        before = 0
        for table in self.tables:
            part = _Part(table, before, self.wanted)
            for example in read_examples(part, Schema(self.columns), self.bad):
                yield part.number, example
            before = part.number


class _Part:
    """The wanted rows of one table; `number` is the last one read, counted over all tables from 1."""

    def __init__(self, table: Table, before: int, wanted: range) -> None:
        self.table, self.name, self.number, self.wanted = table, table.name, before, wanted

    def rows(self) -> Iterator[RawRow | BadRow]:
        for row in self.table.rows():
            if self.number >= self.wanted.stop:
                return
            self.number += 1
            if self.number > self.wanted.start:
                yield row

    def label_names(self, column: str) -> tuple[str, ...]:
        return self.table.label_names(column)


def open_input(
    source: DataSource, trained_on: Sequence[str], *, split: str | None, shard: tuple[int, int], bad: BadRows
) -> Input:
    """Find the tables and the columns: those that the run was trained on, unless the source names others."""
    tables = find_tables(source, split)
    present = dict[str, None]()
    columns = None
    for table in tables:
        here = peek(table)[1]
        present.update(dict.fromkeys(here))
        columns = columns or _columns(here, table.name, source, trained_on)
        choose_columns(here, table.name, text=columns.text, text_pair=columns.text_pair, need_label=False)
    assert columns is not None
    return Input(tables, list(present), columns, bad, _wanted(tables, *shard))


def find_tables(source: DataSource, split: str | None = None) -> list[Table]:
    """The files of a folder by name, or one split of a data set: its test set, else validation, else train."""
    files = data_files(Path(source.data))
    if files:
        if split:
            raise UsageError(f"--split {split}: {source.data} is a folder of files without splits: leave it out")
        return [FileTable(file, str(file), source.encoding) for file in files]
    tables = locate(source)
    name = split or next(name for name in ("test", "validation", "train") if name in tables)
    if name not in tables:
        raise UsageError(f"--split {split}: {source.data} has no such split, only {', '.join(tables)}")
    return [tables[name]]


def data_files(folder: Path) -> list[Path]:
    """The data files of a folder in the order of their names; none if it is no folder, or one of train and test."""
    if not folder.is_dir():
        return []
    files = [path for path in sorted(folder.iterdir()) if _ending(path) in FORMATS]
    return [] if any(path.name.startswith("train.") for path in files) else files


def _ending(path: Path) -> str:
    return Path(path.name.removesuffix(".gz").removesuffix(".xz")).suffix.lower()


def _columns(present: Sequence[str], file: str, source: DataSource, trained_on: Sequence[str]) -> Columns:
    text, text_pair = source.text, source.text_pair
    if len(trained_on) == 1 and text_pair:
        raise UsageError(f"--text-pair {text_pair}: the run was trained on single texts: leave it out")
    known = [*trained_on, None, None]
    for asked, column, flag in ((text, known[0], "--text"), (text_pair, known[1], "--text-pair")):
        if asked is None and column is not None and column not in present:
            shown = ", ".join(map(repr, present[:20]))
            raise DataError(
                f"{file}: no column {column!r}, which the run was trained on; the columns are {shown}: name the "
                f"one to read with {flag}"
            )
    return choose_columns(present, file, text=text or known[0], text_pair=text_pair or known[1], need_label=False)


def _wanted(tables: Sequence[Table], number: int, of: int) -> range:
    """The rows of shard `number` of `of`, in whole windows: contiguous, so that shards in order make the whole."""
    if of == 1:
        return range(2**62)
    rows = sum(map(_count, tables))
    windows = -(-rows // WINDOW_ROWS)
    return range((number - 1) * windows // of * WINDOW_ROWS, number * windows // of * WINDOW_ROWS)


def read_shard(text: str | None) -> tuple[int, int]:
    """i/n -> (i, n), i from 1."""
    if text is None:
        return 1, 1
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise UsageError(f"--shard {text}: give i/n with i from 1 to n, such as 2/8")
    return int(number), int(of)


def parquet_schema(tables: Sequence[Table]) -> Any:
    """The schema of Parquet files; None for anything else."""
    if not all(isinstance(table, FileTable) and _is_parquet(table) for table in tables):
        return None
    import pyarrow
    import pyarrow.parquet

    schemas = [pyarrow.parquet.read_schema(table.path) for table in tables if isinstance(table, FileTable)]
    return pyarrow.unify_schemas(schemas, promote_options="permissive").remove_metadata()


def fingerprint(tables: Sequence[Table]) -> tuple[str, int]:
    """A digest of all that the tables hold, and about how many rows that is."""
    digest, rows = hashlib.sha256(), 0
    for table in tables:
        if isinstance(table, HubTable):
            digest.update(table.dataset._fingerprint.encode())
            rows += table.dataset.num_rows
            continue
        assert isinstance(table, FileTable)
        lines = 0
        try:
            with open_bytes(table.path) as stream:
                while chunk := stream.read(2**20):
                    digest.update(chunk)
                    lines += chunk.count(b"\n")
        except DAMAGED as error:
            raise DataError(f"{table.name}: the compressed data is damaged ({error}): compress it again") from None
        rows += _count(table) if _is_parquet(table) else lines
    return digest.hexdigest(), rows


def _count(table: Table) -> int:
    """How many rows, bad ones counted too."""
    if isinstance(table, HubTable):
        return int(table.dataset.num_rows)
    if isinstance(table, FileTable) and _is_parquet(table):
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(table.path).num_rows)
    return sum(1 for _ in table.rows())


def _is_parquet(table: FileTable) -> bool:
    return sniff(table.path, table.name, table.encoding)[0] == "parquet"
