"""Files -> rows: CSV, TSV, JSON lines (plain, .gz, .xz) and Parquet, with the line each row starts on."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from budgetformer.data.files import MAX_ROW, Lines, RowError, check_encoding, head_of
from budgetformer.errors import DataError, MissingExtraError

FORMATS = {
    ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
MAX_RAW = 10_000  # characters of a bad row that go to the quarantine file


class RawRow(NamedTuple):
    """A row as the file holds it. `line` counts from 1; in Parquet and hub data it is the row's number."""

    line: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: its kind, the reason with its remedy, and what was read of it."""

    file: str
    line: int
    kind: str
    reason: str
    raw: str

    @classmethod
    def of(cls, error: RowError, file: str, line: int) -> BadRow:
        return cls(file, line, error.kind, error.reason, error.raw[:MAX_RAW])


class Table(Protocol):
    """Rows that can be read again and again, in the same order."""

    @property
    def name(self) -> str: ...

    def rows(self) -> Iterator[RawRow | BadRow]: ...

    def label_names(self, column: str) -> tuple[str, ...]:
        """The names behind the integer labels of a column; empty if the labels name themselves."""
        ...


@dataclass(frozen=True)
class FileTable:
    """A data file. `where` keeps only the rows whose column holds a value."""

    path: Path
    name: str
    encoding: str = "utf-8"
    names: tuple[str, ...] = ()
    where: tuple[str, str] | None = None

    def rows(self) -> Iterator[RawRow | BadRow]:
        for row in read_rows(self.path, name=self.name, encoding=self.encoding):
            if self.where and isinstance(row, RawRow) and row.fields.get(self.where[0]) != self.where[1]:
                continue
            yield row

    def label_names(self, column: str) -> tuple[str, ...]:
        return self.names


def read_rows(path: Path | str, *, name: str | None = None, encoding: str = "utf-8") -> Iterator[RawRow | BadRow]:
    """Stream a file's rows; broken ones come as `BadRow`, in their place. `name` is what messages call it."""
    path = Path(path)
    name = name or str(path)
    format_ = sniff(path, name, encoding)
    if format_.kind == "parquet":
        yield from _parquet_rows(path, name)
        return
    lines = Lines(path, name, encoding)
    try:
        yield from _json_rows(lines) if format_.kind == "jsonl" else _delimited_rows(lines, format_)
    finally:
        lines.close()


class Format(NamedTuple):
    """csv, tsv, jsonl or parquet; of the first two, what separates fields and whether a quote may enclose one."""

    kind: str
    delimiter: str = ""
    quoted: bool = True


def sniff(path: Path, name: str, encoding: str) -> Format:
    """The format of a file: by its name, else (and for standard input) by how it starts."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in (".gz", ".xz")]
    kind = FORMATS.get(suffixes[-1], "") if suffixes else ""
    head = head_of(path, name)
    if head.startswith(b"PAR1"):
        return Format("parquet")
    if kind == "parquet":
        raise DataError(f"{name}: this is no Parquet file (it starts with {head[:4]!r}): name it after its format")
    text = head.decode(check_encoding(encoding), "replace")
    start = text.lstrip("\ufeff \t\r\n")
    if not kind and start.startswith(("{", "[")):
        kind = "jsonl"
    if kind == "jsonl" and start.startswith("["):
        raise DataError(f"{name}: this is one JSON array, not JSON lines: convert it with jq -c '.[]'")
    if kind == "jsonl":
        return Format("jsonl")
    delimiter = "\t" if kind == "tsv" else max(",", "\t", ";", key=start.split("\n", 1)[0].count)
    quoted = delimiter != "\t" or not _plain_tabs(text)
    return Format(kind or ("tsv" if delimiter == "\t" else "csv"), delimiter, quoted)


def _plain_tabs(text: str) -> bool:
    """Whether a quote means nothing special here: some field opens with one and does not close it."""
    lines = text.split("\n")[:-1]
    width = lines[0].count("\t") if lines else 0
    quoted = [field for line in lines for field in line.rstrip("\r").split("\t") if field.startswith('"')]
    loose = any(not re.fullmatch(r'"([^"]|"")*"', field) for field in quoted)
    return loose and all(line.count("\t") == width for line in lines if line)


def _json_rows(lines: Lines) -> Iterator[RawRow | BadRow]:
    while True:
        try:
            text = next(lines).strip()
            if text:
                yield RawRow(lines.number, _json_object(text))
        except StopIteration:
            return
        except RowError as error:
            yield BadRow.of(error, lines.file, lines.number)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("broken JSON", f"broken JSON ({error}): a line must hold one JSON object", text) from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        reason = f'the line holds a JSON {kind}, not an object such as {{"text": ..., "label": ...}}'
        raise RowError("broken JSON", reason, text)
    return value


class _RecordLines(Iterator[str]):
    """Feeds lines to csv.reader and remembers those of the record under way."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.start()

    def start(self) -> None:
        self.first, self.parts, self.size, self.unclosed = self._lines.number + 1, list[str](), 0, False

    def __next__(self) -> str:
        try:
            line = next(self._lines)
        except StopIteration:
            self.unclosed = bool(self.parts)  # the reader wants more of a record that has begun
            raise
        self.parts.append(line)
        self.size += len(line)
        if self.size > MAX_ROW:
            raise self.never_closed()
        return line

    def never_closed(self) -> RowError:
        reason = (
            f'a quote (") opened on line {self.first} is not closed by line {self._lines.number}: '
            'close it, and write a quote inside a quoted field as ""'
        )
        return RowError("unclosed quote", reason, "".join(self.parts[:20]))


def _delimited_rows(lines: Lines, format_: Format) -> Iterator[RawRow | BadRow]:
    record = _RecordLines(lines)
    quoting: Any = csv.QUOTE_MINIMAL if format_.quoted else csv.QUOTE_NONE
    reader = csv.reader(record, delimiter=format_.delimiter, quoting=quoting)
    header: list[str] = []
    while True:
        record.start()
        try:
            values = _next_record(reader, record)
            if not values:
                continue
            if not header:
                header = _header(values, lines.file, record.first)
                continue
            if len(values) != len(header):
                hint = "quote fields that hold the delimiter or a line break"
                reason = f"{len(values)} fields where the header has {len(header)} ({', '.join(header)}): {hint}"
                raise RowError("wrong number of fields", reason, "".join(record.parts))
            yield RawRow(record.first, dict(zip(header, values, strict=True)))
        except StopIteration:
            return
        except RowError as error:
            if not header:
                raise DataError(f"{lines.file}, line {record.first}: {error.reason}") from None
            yield BadRow.of(error, lines.file, record.first if record.parts else lines.number)


def _next_record(reader: Iterator[list[str]], record: _RecordLines) -> list[str]:
    limit = csv.field_size_limit(MAX_ROW)  # the module knows no other way; put back before anyone looks
    try:
        values = next(reader)
    except csv.Error as error:
        raise RowError("broken CSV", f"{error}: check quotes and line breaks", "".join(record.parts)) from None
    finally:
        csv.field_size_limit(limit)
    if record.unclosed:
        raise record.never_closed()
    return values


def _header(values: Sequence[str], file: str, line: int) -> list[str]:
    names = [value.strip() for value in values]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{file}, line {line}: column {twice[0]!r} appears twice in the header: rename one of them")
    return names


def _parquet_rows(path: Path, name: str) -> Iterator[RawRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("data", "pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            number = 0
            for batch in parquet.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield RawRow(number, fields)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: cannot be read as Parquet ({error}): write the file again") from None
