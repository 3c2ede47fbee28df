"""Where predict writes: CSV, TSV, JSON lines (plain or .gz), Parquet, or standard output, window by window.

Every window is a file of its own until all are joined under the output's name, so that a killed run goes on after its
last complete window as if it had never been killed.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from budgetformer.data.sources import FORMATS, load_pyarrow
from budgetformer.data.tokens import TextError
from budgetformer.errors import DataError, ModelError, UsageError
from budgetformer.runs.files import flush, named_write_errors

Row = dict[str, Any]
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that a spreadsheet computes
NUMBER = re.compile(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?")


def format_of(output: Path) -> str:
    """csv, tsv, jsonl or parquet, by the ending."""
    plain = output.name.removesuffix(".gz")
    kind = FORMATS.get(Path(plain).suffix.lower())
    if kind is None or (kind == "parquet" and plain != output.name):
        raise UsageError(f"-o {output}: its ending must say the format: .csv, .tsv, .jsonl (each also .gz) or .parquet")
    return kind


class Sink:
    """Takes windows of rows for an output (None: standard output), in the format of its ending.

    columns: the input's. added: the answer's columns and their kinds. header: whether CSV begins with one. schema: of
    Parquet input. escape: whether spreadsheets must not take a cell of CSV for a formula. The windows lie in
    OUT.parts; the output gets its name only when it is complete.
    """

    def __init__(
        self, output: Path | None, columns: list[str], added: dict[str, str], *, header: bool, schema: Any, escape: bool
    ) -> None:
        self.output, self.count = output, 0
        kind = format_of(output) if output else "jsonl"
        if escape and kind not in ("csv", "tsv"):
            raise UsageError("--escape-formulas is for CSV and TSV, which spreadsheets open: leave it out")
        compressed = output is not None and output.name.endswith(".gz")
        text = _Text(kind, [*columns, *added], header, compressed, escape)
        self.format = _Parquet(columns, added, schema) if kind == "parquet" else text
        self.folder = output.with_name(output.name + ".parts") if output else Path()

    def open(self, count: int, size: int) -> None:
        """Begin, or go on after so many windows of so many bytes together; what came after them is deleted."""
        self.count = count
        if not self.output:
            return
        parts = self._parts()
        with named_write_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
            present = set(self.folder.iterdir())
            if others := [file for file in present if not re.fullmatch("[0-9]{8}", file.name)]:
                raise UsageError(f"{others[0]} is not of predict's: move {self.folder} away, or give another -o")
            for file in present.difference(parts):
                file.unlink()
        if missing := sorted(set(parts) - present):
            raise ModelError(f"{missing[0]} is missing: begin again with --overwrite")
        if sum(part.stat().st_size for part in parts) != size:
            raise ModelError(f"{self.folder} was changed since it was written: begin again with --overwrite")
        self.format.resume(parts)

    def write(self, rows: Sequence[Row]) -> int:
        """Write a window to disk; its bytes."""
        data = self.format.encode(rows)
        if not self.output:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            return 0
        part, self.count = self._part(self.count), self.count + 1
        with named_write_errors(self.folder):
            part.write_bytes(data)
            flush(part)
        return len(data)

    def finish(self) -> None:
        """Join the windows under the output's name; harmless if that was done before."""
        if self.output:
            joined = self.output.with_name(f".{self.output.name}.tmp")
            with named_write_errors(self.output):
                self.format.join(self._parts(), joined)
                flush(joined)
                joined.replace(self.output)
                flush(self.output.parent)

    def _parts(self) -> list[Path]:
        return [self._part(number) for number in range(self.count)]

    def _part(self, number: int) -> Path:
        return self.folder / f"{number:08d}"


def remove_parts(folder: Path) -> None:
    """Remove a finished output's windows, and nothing else that may lie beside them."""
    for file in folder.glob("[0-9]" * 8):
        file.unlink()
    with contextlib.suppress(OSError):  # it is not there, or not empty
        folder.rmdir()


class _Text:
    """CSV, TSV or JSON lines. Compressed, the header and every window are gzip members of their own."""

    def __init__(self, kind: str, columns: list[str], header: bool, compressed: bool, escape: bool) -> None:
        self.kind, self.columns, self.compressed, self.escape = kind, columns, compressed, escape
        names = [dict(zip(columns, columns, strict=True))]
        self.header = self.encode(names) if header and kind != "jsonl" else b""

    def resume(self, parts: Sequence[Path]) -> None:
        """Nothing depends on earlier windows."""

    def encode(self, rows: Sequence[Row]) -> bytes:
        if self.kind == "jsonl":
            lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        else:
            lines = self._delimited(rows)
        data = "".join(lines).encode("utf-8", "backslashreplace")  # half a surrogate pair, escaped as JSON does
        return gzip.compress(data, mtime=0) if self.compressed else data

    def join(self, parts: Sequence[Path], target: Path) -> None:
        with target.open("wb") as out:
            out.write(self.header)
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out, 2**20)

    def _delimited(self, rows: Sequence[Row]) -> list[str]:
        lines = _Lines()
        writer = csv.writer(lines, delimiter="\t" if self.kind == "tsv" else ",", lineterminator="\r\n")
        known = set(self.columns)
        for number, row in enumerate(rows):
            if unknown := row.keys() - known:
                why = f"none of the columns that the first rows have, so {self.kind.upper()} has no place for it"
                raise TextError(number, f"the field {min(unknown)!r} is {why}: write JSON lines (-o NAME.jsonl)")
            writer.writerow([self._cell(row.get(column)) for column in self.columns])
        return lines

    def _cell(self, value: Any) -> Any:
        """Lists, objects and truth values as JSON writes them; nothing for None."""
        if isinstance(value, bool | list | dict):
            return json.dumps(value, ensure_ascii=False, default=str)
        if self.escape and isinstance(value, str) and value.startswith(FORMULA) and not NUMBER.fullmatch(value):
            return "'" + value
        return value


class _Lines(list[str]):
    """What csv.writer writes to: with lines that end with CR LF it quotes a lone CR too, but here they end with LF."""

    def write(self, line: str) -> None:
        self.append(line.removesuffix("\r\n") + "\n")


class _Parquet:
    """Parquet, whose schema is the union of all windows': a column keeps the type it has in Parquet input."""

    def __init__(self, columns: Sequence[str], added: dict[str, str], schema: Any) -> None:
        self.arrow = pyarrow = load_pyarrow()
        self.parquet, self.columns, self.added = pyarrow.parquet, [*columns, *added], added
        text, number = pyarrow.string(), pyarrow.float64()
        kinds = {"text": text, "texts": pyarrow.list_(text), "number": number, "numbers": pyarrow.list_(number),
                 "flag": pyarrow.bool_()}  # fmt: skip
        self.types = {name: kinds[kind] for name, kind in added.items()}
        if schema is not None:
            self.types |= dict(zip(schema.names, schema.types, strict=True))
        self.schema = pyarrow.schema([(name, self.types[name]) for name in self.columns if name in self.types])

    def resume(self, parts: Sequence[Path]) -> None:
        for part in parts:
            self._extend_schema(self.parquet.read_schema(part))

    def encode(self, rows: Sequence[Row]) -> bytes:
        names = list(dict.fromkeys(name for row in rows for name in row))
        out = io.BytesIO()
        try:
            arrays = [self.arrow.array([row.get(name) for row in rows], self.types.get(name)) for name in names]
            table = self.arrow.table(dict(zip(names, arrays, strict=True)))
            self._extend_schema(table.schema)
        except (self.arrow.ArrowException, UnicodeEncodeError, OverflowError) as error:
            raise DataError(
                f"the rows do not fit one Parquet schema ({error}): give a column one type, or write JSON lines"
            ) from None
        self.parquet.write_table(table, out)
        return out.getvalue()

    def join(self, parts: Sequence[Path], target: Path) -> None:
        place = {name: number for number, name in enumerate(self.columns)}
        schema = self.arrow.schema(
            sorted(self.schema, key=lambda field: (field.name in self.added, place.get(field.name, len(place))))
        )
        with self.parquet.ParquetWriter(target, schema) as writer:
            for part in parts:
                table = self.parquet.ParquetFile(part).read()
                columns = [
                    table[field.name].cast(field.type) if field.name in table.column_names
                    else self.arrow.nulls(len(table), field.type)
                    for field in schema
                ]  # fmt: skip
                writer.write_table(self.arrow.table(columns, schema=schema))

    def _extend_schema(self, schema: Any) -> None:
        self.schema = self.arrow.unify_schemas([self.schema, schema], promote_options="permissive")
