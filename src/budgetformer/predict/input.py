"""What predict reads: files, folders and data sets row by row with all their fields, in windows.

Where a window ends depends on the rows alone, so a resumed run and every shard cut the same windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from budgetformer.data.examples import BadRows, Example, Schema, choose_columns, read_examples
from budgetformer.data.locate import DataSource, Table, choose_split, locate
from budgetformer.data.scan import peek
from budgetformer.data.sources import BadRow, FileTable, RawRow, format_by_name, load_pyarrow, named_read_errors
from budgetformer.errors import DataError, UsageError

WINDOW_ROWS, WINDOW_CHARS = 4096, 2**23


@dataclass(frozen=True)
class Input:
    """The tables to score, one after the other; `shard` is the range of their rows to read, bad ones counted too."""

    tables: list[Table]
    present: list[str]
    columns: Schema
    bad: BadRows
    shard: range

    def windows(self, done: int = 0) -> Iterator[tuple[list[Example], int]]:
        """Rows that are scored together, and how many of the input's rows were read when they were enough.

        The first `done` rows are left out; they are only checked again, so that bad ones are set aside.
        """
        number = self.shard.start  # of the row last read, among the rows of all tables, from 1

        def numbered() -> Iterator[RawRow | BadRow]:
            nonlocal number
            rows = itertools.chain.from_iterable(table.rows() for table in self.tables)
            for row in itertools.islice(rows, self.shard.start, self.shard.stop):
                number += 1
                yield row

        window, chars, last = list[Example](), 0, 0
        for example in read_examples(numbered(), self.columns, self.bad):
            if number <= done:
                continue
            size = sum(len(value) for value in example.fields.values() if isinstance(value, str))
            next_block = (number - 1) // WINDOW_ROWS != (last - 1) // WINDOW_ROWS
            if window and (next_block or chars + size > WINDOW_CHARS):
                yield window, last
                window, chars = [], 0
            window.append(example)
            chars, last = chars + size, number
        if window:
            yield window, last


def open_input(
    source: DataSource, trained_on: Sequence[str], *, split: str | None, shard: tuple[int, int], bad: BadRows
) -> Input:
    """Find the tables and the columns: those that the run was trained on, unless the source names others.

    The tables are the files of a folder by name, or one split of a data set: its test set, else validation, else train.
    """
    tables: list[Table] = [FileTable(file, str(file), source.encoding) for file in data_files(Path(source.data))]
    if tables and split:
        raise UsageError(f"--split {split}: {source.data} is a folder of files without splits: leave it out")
    if not tables:
        located = locate(source)
        tables = [located[choose_split(located, split, source.data)]]
    present = [peek(table)[1] for table in tables]
    columns = _columns(present[0], tables[0].name, source, trained_on)
    for table, here in zip(tables, present, strict=True):
        choose_columns(here, table.name, text=columns.text, text_pair=columns.text_pair, need_label=False)
    every = list(dict.fromkeys(itertools.chain.from_iterable(present)))
    return Input(tables, every, columns, bad, _shard_rows(tables, *shard))


def data_files(folder: Path) -> list[Path]:
    """The data files of a folder in the order of their names; none if it is no folder, or one of train and test."""
    with named_read_errors(str(folder)):
        files = [path for path in sorted(folder.iterdir()) if format_by_name(path)] if folder.is_dir() else []
    return [] if any(path.name.startswith("train.") for path in files) else files


def _columns(present: Sequence[str], file: str, source: DataSource, trained_on: Sequence[str]) -> Schema:
    text, text_pair = source.text, source.text_pair
    if len(trained_on) == 1 and text_pair:
        raise UsageError(f"--text-pair {text_pair}: the run was trained on single texts: leave it out")
    known = [*trained_on, None, None]
    for asked, column, flag in zip((text, text_pair), known, ("--text", "--text-pair"), strict=False):
        if asked is None and column is not None and column not in present:
            shown = ", ".join(map(repr, present[:20]))
            raise DataError(
                f"{file}: no column {column!r}, which the run was trained on; the columns are {shown}: name the "
                f"one to read with {flag}"
            )
    return choose_columns(present, file, text=text or known[0], text_pair=text_pair or known[1], need_label=False)


def _shard_rows(tables: Sequence[Table], number: int, of: int) -> range:
    """The rows of shard `number` of `of`, in complete windows: contiguous, so that shards in order make the input."""
    if of == 1:
        return range(2**62)
    windows = -(-sum(table.count() for table in tables) // WINDOW_ROWS)
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
    files = [table.path for table in tables if isinstance(table, FileTable) and table.is_parquet]
    if len(files) < len(tables):
        return None
    pyarrow = load_pyarrow()
    schemas = [pyarrow.parquet.read_schema(file) for file in files]
    return pyarrow.unify_schemas(schemas, promote_options="permissive").remove_metadata()
