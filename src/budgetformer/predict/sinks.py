"""Where predict writes: CSV, TSV, JSON lines (plain or .gz), Parquet, or standard output, window by window.

A sink's `position` says how far it has come; opened at a position that was once reached, it forgets what came after,
so that a killed run goes on as if it had never been killed. The output gets its name only when it is complete.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from budgetformer.data.sources import FORMATS
from budgetformer.data.tokens import TextError
from budgetformer.errors import DataError, MissingExtraError, ModelError, UsageError
from budgetformer.runs.files import flush, named_write_errors

Row = dict[str, Any]


class Sink(ABC):
    """Takes windows of rows. `columns` are the input's, `added` maps the answer's columns to their kinds."""

    def __init__(self, columns: Sequence[str], added: dict[str, str]) -> None:
        self.columns, self.added = [*columns, *added], added

    @abstractmethod
    def open(self, position: int) -> int:
        """Begin, or go on, at a position; where that has led to (a header may have been written)."""

    @abstractmethod
    def write(self, rows: Sequence[Row]) -> int:
        """Write a window to disk; the position after it."""

    @abstractmethod
    def finish(self, position: int) -> None:
        """Give the output, complete at this position, its name; harmless if it has it already."""

    def clean(self) -> None:  # noqa: B027 - most leave nothing behind
        """Remove what is not needed once the output has its name."""


def make_sink(output: Path | None, columns: Sequence[str], added: dict[str, str], *, header: bool, schema: Any) -> Sink:
    """The sink for an output's ending; `header` says whether CSV begins with one."""
    if output is None:
        return _Stdout(columns, added)
    if format_of(output) == "parquet":
        return _Parquet(output, columns, added, schema)
    return _Text(output, columns, added, header)


def format_of(output: Path) -> str:
    """csv, tsv, jsonl or parquet, by the ending."""
    plain = output.name.removesuffix(".gz")
    found = FORMATS.get(Path(plain).suffix.lower())
    if found is None or (found == "parquet" and plain != output.name):
        raise UsageError(f"-o {output}: its ending must say the format: .csv, .tsv, .jsonl (each also .gz) or .parquet")
    return found


def json_lines(rows: Sequence[Row]) -> bytes:
    """One object a line; what JSON does not know (dates, bytes) as text."""
    lines = "".join([json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows])
    return lines.encode("utf-8", "backslashreplace")  # half a surrogate pair, escaped as JSON does


class _Stdout(Sink):
    def open(self, position: int) -> int:
        return 0

    def write(self, rows: Sequence[Row]) -> int:
        sys.stdout.buffer.write(json_lines(rows))
        sys.stdout.buffer.flush()
        return 0

    def finish(self, position: int) -> None:
        pass


class _Text(Sink):
    """Grows OUT.part; its position is in bytes. Compressed, every window is a gzip member of its own."""

    def __init__(self, output: Path, columns: Sequence[str], added: dict[str, str], header: bool) -> None:
        super().__init__(columns, added)
        self.output, self.part = output, output.with_name(output.name + ".part")
        self.format, self.gz = format_of(output), output.name.endswith(".gz")
        self.header = header and self.format != "jsonl"
        self.known = set(self.columns)
        self.file: BinaryIO = io.BytesIO()

    def open(self, position: int) -> int:
        if position > (self.part.stat().st_size if self.part.exists() else 0):
            raise ModelError(f"{self.part} was cut short since it was written: begin again with --overwrite")
        with named_write_errors(self.part):
            self.file = self.part.open("r+b" if position else "wb")
            self.file.truncate(position)
            self.file.seek(position)
            if not position and self.header:
                self._append(self._delimited([dict(zip(self.columns, self.columns, strict=True))]))
        return self.file.tell()

    def write(self, rows: Sequence[Row]) -> int:
        data = json_lines(rows) if self.format == "jsonl" else self._delimited(rows)
        with named_write_errors(self.part):
            self._append(data)
            os.fsync(self.file.fileno())
        return self.file.tell()

    def _append(self, data: bytes) -> None:
        self.file.write(gzip.compress(data, mtime=0) if self.gz else data)
        self.file.flush()

    def _delimited(self, rows: Sequence[Row]) -> bytes:
        lines = _Lines()
        writer = csv.writer(lines, delimiter="\t" if self.format == "tsv" else ",", lineterminator="\r\n")
        for number, row in enumerate(rows):
            if unknown := row.keys() - self.known:
                why = f"none of the columns that the first rows have, so {self.format.upper()} has no place for it"
                raise TextError(number, f"the field {min(unknown)!r} is {why}: write JSON lines (-o NAME.jsonl)")
            writer.writerow([_cell(row.get(column)) for column in self.columns])
        return "".join(lines).encode("utf-8", "backslashreplace")

    def finish(self, position: int) -> None:
        self.file.close()
        with named_write_errors(self.output):
            if self.part.exists():
                os.truncate(self.part, position)
                self.part.replace(self.output)
                flush(self.output.parent)


class _Lines(list[str]):
    """What csv.writer writes to: told that lines end with CR LF it quotes a lone CR too, but they end with LF."""

    def write(self, line: str) -> None:
        self.append(line.removesuffix("\r\n") + "\n")


def _cell(value: Any) -> Any:
    """Lists, objects and truth values as JSON writes them; nothing for None."""
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value


class _Parquet(Sink):
    """Fills OUT.parts with one file a window, and joins them in the end; its position is the number of files."""

    def __init__(self, output: Path, columns: Sequence[str], added: dict[str, str], schema: Any) -> None:
        super().__init__(columns, added)
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise MissingExtraError("data", "pyarrow") from None
        self.arrow, self.parquet = pyarrow, pyarrow.parquet
        self.output, self.parts, self.position = output, output.with_name(output.name + ".parts"), 0
        text, number = pyarrow.string(), pyarrow.float64()
        kinds = {"text": text, "texts": pyarrow.list_(text), "number": number, "numbers": pyarrow.list_(number),
                 "flag": pyarrow.bool_()}  # fmt: skip
        self.types = {name: kinds[kind] for name, kind in added.items()}
        if schema is not None:
            self.types |= dict(zip(schema.names, schema.types, strict=True))
        self.empty = pyarrow.schema([(name, self.types[name]) for name in self.columns if name in self.types])
        self.schema = self.empty

    def open(self, position: int) -> int:
        self.position = position
        with named_write_errors(self.parts):
            self.parts.mkdir(exist_ok=True)
            kept = {self._part(number) for number in range(position)}
            for file in set(self.parts.iterdir()) - kept:
                file.unlink()
        self.schema = self._schema(position)
        return position

    def write(self, rows: Sequence[Row]) -> int:
        names = list(dict.fromkeys(name for row in rows for name in row))
        try:
            arrays = [self.arrow.array([row.get(name) for row in rows], self.types.get(name)) for name in names]
            table = self.arrow.table(dict(zip(names, arrays, strict=True)))
            self.schema = self._join(self.schema, table.schema)
        except (self.arrow.ArrowException, UnicodeEncodeError, OverflowError) as error:
            raise DataError(
                f"the rows do not fit one Parquet schema ({error}): give a column one type, or write JSON lines"
            ) from None
        with named_write_errors(self.parts):
            file = self._part(self.position)
            self.parquet.write_table(table, file)
            flush(file)
        self.position += 1
        return self.position

    def finish(self, position: int) -> None:
        whole = self.output.with_name(f".{self.output.name}.tmp")
        place = {name: number for number, name in enumerate(self.columns)}
        fields = self._schema(position)
        schema = self.arrow.schema(
            sorted(fields, key=lambda field: (field.name in self.added, place.get(field.name, len(place))))
        )
        with named_write_errors(self.output):
            with self.parquet.ParquetWriter(whole, schema) as writer:
                for number in range(position):
                    part = self.parquet.ParquetFile(self._part(number)).read()
                    columns = [
                        part[field.name].cast(field.type) if field.name in part.column_names
                        else self.arrow.nulls(len(part), field.type)
                        for field in schema
                    ]  # fmt: skip
                    writer.write_table(self.arrow.table(columns, schema=schema))
            flush(whole)
            whole.replace(self.output)
            flush(self.output.parent)

    def clean(self) -> None:
        shutil.rmtree(self.parts, ignore_errors=True)

    def _schema(self, position: int) -> Any:
        """What holds the first parts."""
        schema = self.empty
        for number in range(position):
            if not self._part(number).exists():
                raise ModelError(f"{self._part(number)} is missing: begin again with --overwrite")
            schema = self._join(schema, self.parquet.read_schema(self._part(number)))
        return schema

    def _join(self, one: Any, other: Any) -> Any:
        return self.arrow.unify_schemas([one, other], promote_options="permissive")

    def _part(self, number: int) -> Path:
        return self.parts / f"{number:08d}.parquet"
