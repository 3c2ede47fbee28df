"""Bytes on disk or standard input -> numbered lines of text, in bounded memory."""

from __future__ import annotations

import atexit
import codecs
import gzip
import io
import lzma
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from budgetformer.errors import DataError, UsageError

MAX_ROW = 16 * 2**20  # bytes of one row, line breaks inside quotes included
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


class RowError(Exception):
    """A row that cannot be used: what kind of fault, the reason with its remedy, and the row as it was read.

    Caught by the reader, never shown as an error.
    """

    def __init__(self, kind: str, reason: str, raw: str = "") -> None:
        super().__init__(reason)
        self.kind, self.reason, self.raw = kind, reason, raw


class Lines(Iterator[str]):
    """The lines of a file with their line breaks; `number` is the line last read, from 1.

    A line that cannot be decoded, holds a NUL byte or is longer than `MAX_ROW` raises `RowError`, and the
    next call reads the line after it. Damage to the compressed stream is a DataError: nothing follows it.
    """

    def __init__(self, path: Path, file: str, encoding: str) -> None:
        self.file, self.number, self._offset = file, 0, 0
        self._encoding = check_encoding(encoding)
        self._stream, self._text = open_bytes(path), None
        if "a\n".encode(self._encoding) != b"a\n":  # its line break is not one byte
            self._text = io.TextIOWrapper(self._stream, encoding=self._encoding, newline="\n")
            self._encoding = "utf-8"

    def __next__(self) -> str:
        raw = self._read(MAX_ROW + 1)
        if not raw:
            raise StopIteration
        self.number += 1
        start, self._offset = self._offset, self._offset + len(raw)
        if len(raw) > MAX_ROW:
            self._skip_rest(raw)
            raise RowError(
                "row too long",
                f"the line is longer than {MAX_ROW // 2**20} MiB: is this file really made of lines of text?",
                raw[:200].decode(self._encoding, "backslashreplace"),
            )
        try:
            line = raw.decode(self._encoding)
        except UnicodeDecodeError as error:
            raise self._undecodable(raw, start, error) from None
        if "\0" in line:
            place = line.index("\0") + 1
            raise RowError("NUL byte", f"NUL byte at character {place}: remove it", line.rstrip("\r\n"))
        return line.removeprefix("\ufeff") if self.number == 1 else line

    def close(self) -> None:
        self._stream.close()

    def _read(self, size: int) -> bytes:
        try:
            return self._text.readline(size).encode() if self._text else self._stream.readline(size)
        except DAMAGED as error:
            raise DataError(
                f"{self.file}, after line {self.number}: the compressed data is cut short or damaged "
                f"({error}): copy or compress the file again"
            ) from None
        except UnicodeError as error:
            raise DataError(
                f"{self.file}, after line {self.number}: {error}: pass the real encoding with --encoding"
            ) from None

    def _skip_rest(self, raw: bytes) -> None:
        while raw and not raw.endswith(b"\n"):
            raw = self._read(2**20)
            self._offset += len(raw)

    def _undecodable(self, raw: bytes, start: int, error: UnicodeDecodeError) -> RowError:
        wide = start == 0 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        reason = (
            f"byte 0x{raw[error.start]:02x} at offset {start + error.start} is not {self._encoding}: "
            f"pass --encoding {'utf-16' if wide else 'latin-1, or whatever the file is written in'}"
        )
        return RowError("wrong encoding", reason, raw.decode(self._encoding, "backslashreplace").rstrip("\r\n"))


def check_encoding(encoding: str) -> str:
    """The encoding's own name; a byte order mark at the start of a file is dropped in any case."""
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        raise UsageError(f"encoding {encoding!r} is unknown: try utf-8, latin-1, cp1252 or utf-16") from None
    return "utf-8" if name == "utf-8-sig" else name


def open_bytes(path: Path) -> BinaryIO:
    """The file's bytes, decompressed if it starts like gzip or xz, whatever its name."""
    try:
        plain = path.open("rb", buffering=2**17)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}): check the path and its permissions") from None
    head = plain.read(6)
    plain.seek(0)
    if head.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", io.BufferedReader(gzip.GzipFile(fileobj=plain), 2**17))
    if head.startswith(b"\xfd7zXZ\0"):
        return cast("BinaryIO", io.BufferedReader(lzma.LZMAFile(plain), 2**17))
    return plain


def head_of(path: Path, file: str, size: int = 2**16) -> bytes:
    """The first bytes of a file, decompressed."""
    with open_bytes(path) as stream:
        try:
            return stream.read(size)
        except DAMAGED as error:
            raise DataError(f"{file}: the compressed data is damaged ({error}): compress the file again") from None


def spool_stdin() -> Path:
    """Standard input as a file, since its first rows are read twice; it goes when the process ends."""
    if sys.stdin.isatty():
        raise UsageError("data '-' means standard input, but nothing is piped into it")
    handle, name = tempfile.mkstemp(prefix="budgetformer-stdin-")
    path = Path(name)
    atexit.register(path.unlink, missing_ok=True)
    with os.fdopen(handle, "wb") as spool:
        shutil.copyfileobj(sys.stdin.buffer, spool)
    return path
