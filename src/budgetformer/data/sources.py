"""Files and standard input -> rows: CSV, TSV, JSON lines (plain, .gz, .xz) and Parquet, in bounded memory, with the
line each row starts on."""

from __future__ import annotations

import atexit
import codecs
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from budgetformer.errors import DataError, MissingExtraError, UsageError

FORMATS = {
    ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
MAX_ROW = 16 * 2**20  # bytes of one row, line breaks inside quotes included
MAX_RAW = 10_000  # characters of a bad row that go to the quarantine file
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


class BadRow(Exception):  # noqa: N818 - readers yield it, as a row
    """A row that cannot be used: what kind of fault, the reason with its remedy, the row as it was read, and where."""

    def __init__(self, kind: str, reason: str, raw: str = "", file: str = "", line: int = 0) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.raw, self.file, self.line = kind, reason, raw[:MAX_RAW], file, line

    def at(self, file: str, line: int) -> BadRow:
        self.file, self.line = file, line
        return self


class Lines(Iterator[str]):
    """The lines of a file with their line breaks, one or more to a record: `first` is the number of the record's first
    line, from 1, `parts` are its lines so far, and `unclosed` says that the file ended where one more was asked for.

    A line that cannot be decoded, holds a NUL byte or is longer than `MAX_ROW` raises `BadRow`, and the
    next call reads the line after it.
    """

    def __init__(self, path: Path, file: str, encoding: str) -> None:
        self.file, self.number, self._offset = file, 0, 0
        self._encoding = check_encoding(encoding)
        stream = open_bytes(path)
        self._readline: Callable[[int], bytes] = stream.readline
        self.close = stream.close
        if "a\n".encode(self._encoding) != b"a\n":  # its line break is not one byte
            text = io.TextIOWrapper(stream, encoding=self._encoding, newline="\n")
            self._encoding = "utf-8"
            self._readline = lambda size: text.readline(size).encode()
        self.start_record()

    def start_record(self) -> None:
        self.first, self.parts, self._size, self.unclosed = self.number + 1, list[str](), 0, False

    def __next__(self) -> str:
        raw = self._readline(MAX_ROW + 1)
        if not raw:
            self.unclosed = bool(self.parts)
            raise StopIteration
        self.number += 1
        start, self._offset = self._offset, self._offset + len(raw)
        if len(raw) > MAX_ROW:
            reason = f"the line is longer than {MAX_ROW // 2**20} MiB: is this file really made of lines of text?"
            beginning = raw[:200].decode(self._encoding, "backslashreplace")
            while raw and not raw.endswith(b"\n"):
                raw = self._readline(2**20)
                self._offset += len(raw)
            raise BadRow("row too long", reason, beginning)
        try:
            line = raw.decode(self._encoding)
        except UnicodeDecodeError as error:
            wide = start == 0 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            remedy = f"pass --encoding {'utf-16' if wide else 'latin-1, or whatever the file is written in'}"
            place = f"byte 0x{raw[error.start]:02x} at offset {start + error.start}"
            shown = raw.decode(self._encoding, "backslashreplace").rstrip("\r\n")
            raise BadRow("wrong encoding", f"{place} is not {self._encoding}: {remedy}", shown) from None
        if "\0" in line:
            reason = f"NUL byte at character {line.index(chr(0)) + 1}: remove it"
            raise BadRow("NUL byte", reason, line.rstrip("\r\n"))
        line = line.removeprefix("\ufeff") if self.number == 1 else line
        self.parts.append(line)
        self._size += len(line)
        if self._size > MAX_ROW:
            raise self.never_closed()
        return line

    def never_closed(self) -> BadRow:
        reason = (
            f'a quote (") opened on line {self.first} is not closed by line {self.number}: '
            'close it, and write a quote inside a quoted field as ""'
        )
        return BadRow("unclosed quote", reason, "".join(self.parts[:20]))


def check_encoding(encoding: str) -> str:
    """The encoding's own name; a byte order mark at the start of a file is dropped in any case."""
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        raise UsageError(f"encoding {encoding!r} is unknown: try utf-8, latin-1, cp1252 or utf-16") from None
    return "utf-8" if name == "utf-8-sig" else name


@contextmanager
def named_read_errors(name: str) -> Iterator[None]:
    """Turn what the system refuses, permissions above all, into an error that names the file."""
    try:
        yield
    except OSError as error:
        cause = f"cannot be read ({error.strerror or error}): check the path and its permissions"
        raise DataError(f"{error.filename or name}: {cause}") from None


def open_bytes(path: Path) -> BinaryIO:
    """The file's bytes, decompressed if it starts like gzip or xz, whatever its name."""
    with named_read_errors(str(path)):
        plain = path.open("rb", buffering=2**17)
        head = plain.read(6)
        plain.seek(0)
    if head.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", io.BufferedReader(gzip.GzipFile(fileobj=plain), 2**17))
    if head.startswith(b"\xfd7zXZ\0"):
        return cast("BinaryIO", io.BufferedReader(lzma.LZMAFile(plain), 2**17))
    return plain


def _read(stream: BinaryIO, size: int, name: str) -> bytes:
    try:
        return stream.read(size)
    except DAMAGED as error:
        raise DataError(f"{name}: the compressed data is damaged ({error}): compress the file again") from None


def spool_stdin() -> Path:
    """Standard input as a file, since its first rows are read twice; it goes when the process ends."""
    if sys.stdin.isatty():
        raise UsageError("data '-' means standard input, but nothing is piped into it")
    handle, name = tempfile.mkstemp(prefix="budgetformer-stdin-")
    atexit.register(os.unlink, name)
    try:
        with open(handle, "wb") as spool:
            shutil.copyfileobj(sys.stdin.buffer, spool)
    except OSError as error:
        cause = f"cannot be kept in {Path(name).parent} ({error.strerror}): set TMPDIR to another folder"
        raise DataError(f"standard input {cause}") from None
    return Path(name)


class RawRow(NamedTuple):
    """A row as the file holds it. `line` counts from 1; in Parquet and hub data it is the row's number."""

    file: str
    line: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class FileTable:
    """A data file. `where` keeps only the rows whose column holds a value. Reading again gives the same rows."""

    path: Path
    name: str
    encoding: str = "utf-8"
    names: tuple[str, ...] = ()
    where: tuple[str, str] | None = None

    def rows(self) -> Iterator[RawRow | BadRow]:
        rows = read_rows(self.path, name=self.name, encoding=self.encoding)
        if self.where is None:
            return rows
        column, value = self.where
        return (row for row in rows if isinstance(row, BadRow) or row.fields.get(column) == value)

    def label_names(self, column: str) -> tuple[str, ...]:
        """The names behind the integer labels of a column; empty if the labels name themselves."""
        return self.names

    @property
    def is_parquet(self) -> bool:
        return sniff(self.path, self.name, self.encoding)[0] == "parquet"

    def count(self) -> int:
        """How many rows, bad ones included."""
        if not self.is_parquet:
            return sum(1 for _ in self.rows())
        return int(load_pyarrow().parquet.read_metadata(self.path).num_rows)

    def fingerprint(self) -> tuple[str, int]:
        """A digest of all that the table holds, and about how many rows that is."""
        digest, lines = hashlib.sha256(), 0
        with open_bytes(self.path) as stream:
            while chunk := _read(stream, 2**20, self.name):
                digest.update(chunk)
                lines += chunk.count(b"\n")
        return digest.hexdigest(), self.count() if self.is_parquet else lines


def read_rows(path: Path | str, *, name: str | None = None, encoding: str = "utf-8") -> Iterator[RawRow | BadRow]:
    """Stream a file's rows; broken ones come as `BadRow`, in their place. `name` is what messages call it."""
    path = Path(path)
    name = name or str(path)
    kind, dialect = sniff(path, name, encoding)
    if kind == "parquet":
        yield from _parquet_rows(path, name)
        return
    with closing(Lines(path, name, encoding)) as lines, named_read_errors(name):
        try:
            yield from _json_rows(lines) if kind == "jsonl" else _delimited_rows(lines, dialect)
        except DAMAGED as error:
            cause = f"the compressed data is cut short or damaged ({error}): copy or compress the file again"
            raise DataError(f"{name}, after line {lines.number}: {cause}") from None
        except UnicodeError as error:
            cause = f"{error}: pass the real encoding with --encoding"
            raise DataError(f"{name}, after line {lines.number}: {cause}") from None


def format_by_name(path: Path) -> str:
    """csv, tsv, jsonl or parquet by the file's ending, compressed or not; empty if it says nothing."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in (".gz", ".xz")]
    return FORMATS.get(suffixes[-1], "") if suffixes else ""


def sniff(path: Path, name: str, encoding: str) -> tuple[str, dict[str, Any]]:
    """The format of a file, by its name, else (and for standard input) by how it starts: csv (whatever separates its
    fields), jsonl or parquet; and what `csv.reader` has to know."""
    kind = format_by_name(path)
    with open_bytes(path) as stream:
        head = _read(stream, 2**16, name)
    if head.startswith(b"PAR1"):
        return "parquet", {}
    if kind == "parquet":
        raise DataError(f"{name}: this is no Parquet file (it starts with {head[:4]!r}): name it after its format")
    text = head.decode(check_encoding(encoding), "replace")
    start = text.lstrip("\ufeff \t\r\n")
    if not kind and start.startswith(("{", "[")):
        kind = "jsonl"
    if kind == "jsonl" and start.startswith("["):
        raise DataError(f"{name}: this is one JSON array, not JSON lines: convert it with jq -c '.[]'")
    if kind == "jsonl":
        return "jsonl", {}
    delimiter = "\t" if kind == "tsv" else max(",", "\t", ";", key=start.split("\n", 1)[0].count)
    plain = delimiter == "\t" and _plain_tabs(text)
    return "csv", {"delimiter": delimiter, "quoting": csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL}


def _plain_tabs(text: str) -> bool:
    """Whether a quote means nothing special here: some field opens with one and does not close it."""
    lines = text.split("\n")[:-1]
    quoted = [field for line in lines for field in line.rstrip("\r").split("\t") if field.startswith('"')]
    loose = any(not re.fullmatch(r'"([^"]|"")*"', field) for field in quoted)
    return loose and all(line.count("\t") == lines[0].count("\t") for line in lines if line)


def _json_rows(lines: Lines) -> Iterator[RawRow | BadRow]:
    while True:
        lines.start_record()
        try:
            text = next(lines).strip()
            if text:
                yield RawRow(lines.file, lines.first, _json_object(text))
        except StopIteration:
            return
        except BadRow as error:
            yield error.at(lines.file, lines.first)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow("broken JSON", f"broken JSON ({error}): a line must hold one JSON object", text) from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        reason = f'the line holds a JSON {kind}, not an object such as {{"text": ..., "label": ...}}'
        raise BadRow("broken JSON", reason, text)
    return value


def _delimited_rows(lines: Lines, dialect: dict[str, Any]) -> Iterator[RawRow | BadRow]:
    reader, header = csv.reader(lines, **dialect), list[str]()
    while True:
        lines.start_record()
        try:
            values = _next_record(reader, lines)
            if not header:
                header = [value.strip() for value in values]
                if twice := [name for name, count in Counter(header).items() if count > 1]:
                    reason = f"column {twice[0]!r} appears twice in the header: rename one of them"
                    raise DataError(f"{lines.file}, line {lines.first}: {reason}")
            elif values and len(values) != len(header):
                hint = "quote fields that hold the delimiter or a line break"
                reason = f"{len(values)} fields where the header has {len(header)} ({', '.join(header)}): {hint}"
                raise BadRow("wrong number of fields", reason, "".join(lines.parts))
            elif values:
                yield RawRow(lines.file, lines.first, dict(zip(header, values, strict=True)))
        except StopIteration:
            return
        except BadRow as error:
            if not header:
                raise DataError(f"{lines.file}, line {lines.first}: {error.reason}") from None
            yield error.at(lines.file, lines.first)


def _next_record(reader: Iterator[list[str]], lines: Lines) -> list[str]:
    limit = csv.field_size_limit(MAX_ROW)  # the module knows no other way; put back before anyone looks
    try:
        values = next(reader)
    except csv.Error as error:
        raise BadRow("broken CSV", f"{error}: check quotes and line breaks", "".join(lines.parts)) from None
    finally:
        csv.field_size_limit(limit)
    if lines.unclosed:
        raise lines.never_closed()
    return values


def load_pyarrow() -> Any:
    """The package, with its module for Parquet."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("data", "pyarrow") from None
    return pyarrow


def _parquet_rows(path: Path, name: str) -> Iterator[RawRow]:
    pyarrow = load_pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            batches = parquet.iter_batches(batch_size=1024)
            for number, fields in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
                yield RawRow(name, number, fields)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: cannot be read as Parquet ({error}): write the file again") from None
