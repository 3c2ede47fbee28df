"""Files that are whole or not there: JSON and directories written atomically, read with errors in words."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError

from budgetformer.errors import DataError, MissingExtraError, ModelError, UsageError

COPY_AGAIN = "copy the directory again, or train or export again"
WEIGHTS = (".safetensors", ".onnx", ".xml", ".bin")  # endings of files that hold them
_SETTINGS = re.compile(r"(config|tokenizer.*|special_tokens_map)\.json")


_GO_ON = "What was saved before is intact: fix it and go on with --resume"


def write_bytes(path: Path, content: bytes, remedy: str = _GO_ON) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    with named_write_errors(path, remedy):
        temporary = _temporary(path)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def write_text(path: Path, text: str, remedy: str = _GO_ON) -> None:
    """Write UTF-8 text as `write_bytes` writes bytes."""
    write_bytes(path, text.encode(), remedy)


def write_json(path: Path, data: Any) -> None:
    """Write JSON as `write_bytes` writes bytes."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


class JsonObject(dict[str, Any]):
    """An object in a JSON file that this program wrote; a missing key is an error that names the file."""

    def __init__(self, items: Any = (), file: str = "", remedy: str = "") -> None:
        super().__init__(items)
        self._file, self._remedy = file, remedy

    def __missing__(self, key: str) -> Any:
        raise ModelError(f"{self._file} has no key {key!r}: {self._remedy}")


def read_json(path: Path, remedy: str, schema: type[BaseModel] | None = None) -> JsonObject:
    """Read a JSON object that this program wrote; a damaged or missing file or key, or another type, is named."""
    document = _parse(_read(path, remedy), str(path), remedy)
    if schema is not None:
        try:
            schema.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            why = f"has {key} {first['input']!r:.60} ({first['msg']})"
            raise ModelError(
                f"{path} {f'has no key {key!r}' if first['type'] == 'missing' else why}: {remedy}"
            ) from None
    return document


def read_json_lines(path: Path, remedy: str) -> list[JsonObject]:
    """Read a file with a JSON object on each line, as `read_json` does."""
    lines = enumerate(_read(path, remedy).split("\n"), 1)
    return [_parse(line, f"{path} line {number}", remedy) for number, line in lines if line.strip()]


def _read(path: Path, remedy: str) -> str:
    with named_read_errors(path, remedy):
        return path.read_text(encoding="utf-8")


def _parse(text: str, file: str, remedy: str) -> JsonObject:
    try:
        value = json.loads(text, object_hook=lambda items: JsonObject(items, file, remedy))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({error}): {remedy}") from None
    if not isinstance(value, JsonObject):
        raise ModelError(f"{file} holds {type(value).__name__}, not a JSON object: {remedy}")
    return value


@contextmanager
def named_read_errors(path: Path, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises for a missing, forbidden or damaged file into an error that says what to do."""
    try:
        yield
    except (ModelError, DataError, MissingExtraError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of a library in Rust
            raise
        if isinstance(error, FileNotFoundError) and not path.exists():
            raise ModelError(f"{path} does not exist: {remedy}") from None
        if isinstance(error, PermissionError) or "Permission denied" in str(error):
            raise ModelError(
                f"{path} cannot be read: permission denied; let this user read it (chmod a+r), or run as its owner"
            ) from None
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(f"{path} cannot be read ({reason}): {remedy}") from error


@contextmanager
def named_write_errors(path: Path, remedy: str = _GO_ON) -> Iterator[None]:
    """Turn a failed write into an error that says what to do; what was saved before stays."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        why = "the disk is full" if full else f"it cannot be written ({getattr(error, 'strerror', None) or error})"
        raise ModelError(f"{path}: {why}. {remedy}") from error


def write_directory(target: Path, fill: Callable[[Path], object], remedy: str = _GO_ON) -> None:
    """Make a directory by `fill`, visible under its name only when it is complete and on disk.

    What stood there before is deleted after the new one has its name; a process that ends in between leaves it under
    another name, from which `recover_directory` puts it back.
    """
    temporary = _temporary(target)
    with named_write_errors(target, remedy):
        recover_directory(target)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            fill(temporary)
            mode = temporary.stat().st_mode & 0o666  # as the umask has it; safetensors makes files for the owner alone
            for path in temporary.iterdir():
                if path.is_file():
                    path.chmod(mode)
                flush(path)
            flush(temporary)
            if target.exists():
                target.rename(_aside(target))
            temporary.rename(target)
            flush(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            recover_directory(target)
            raise
        recover_directory(target)


def write_files(folder: Path, fill: Callable[[Path], object], *, last: str) -> None:
    """Put the files that `fill` makes into `folder`, each whole or not at all, `last` when all others are there."""
    staged = folder / ".staged"
    write_directory(staged, fill)
    with named_write_errors(folder):
        for file in sorted(staged.iterdir(), key=lambda file: file.name == last):
            file.replace(folder / file.name)
        staged.rmdir()


def recover_directories(folder: Path) -> None:
    """Put back what a killed process was about to replace in `folder`, and remove what it left unfinished."""
    for old in folder.glob(".*.old.tmp"):
        recover_directory(folder / old.name.removeprefix(".").removesuffix(".old.tmp"))
    for path in folder.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


LOCK = ".lock"


@contextmanager
def locked(folder: Path, work: str) -> Iterator[None]:
    """Refuse a second process that would do the same `work` in a directory.

    The lock ends with its process, however that ends; a lock file alone, left by a dead process, locks nothing.
    """
    import fcntl

    file = folder / LOCK
    with named_write_errors(file):
        while True:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                raise UsageError(f"another process is {work} in {folder}: wait for it, or give another -o") from None
            if file.exists() and os.path.samestat(os.fstat(handle), file.stat()):
                break
            os.close(handle)  # the process that held it has removed it in the meantime
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)


def recover_directory(target: Path) -> None:
    """Give a directory that a killed process moved aside its name back; remove it where its successor has the name."""
    if (old := _aside(target)).exists():
        shutil.rmtree(old) if target.exists() else old.rename(target)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old.tmp")


def flush(path: Path) -> None:
    """See that a file's or directory's content is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a directory that answers come from, by name."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and (p.suffix in WEIGHTS or _SETTINGS.fullmatch(p.name)))
    return {file.name: hash_file(file) for file in files}


def check_hashes(folder: Path, recorded: Mapping[str, str], *endings: str, remedy: str = COPY_AGAIN) -> None:
    """Refuse files with one of these endings that are not what `hash_files` recorded when they were written."""
    for name, expected in recorded.items():
        if name.endswith(endings):
            file = folder / Path(name).name
            with named_read_errors(file, remedy):
                digest = hash_file(file)
            if digest != expected:
                raise ModelError(f"{file} was damaged or changed after it was written (its SHA-256 is {digest[:12]}, "
                                 f"not {expected[:12]}): {remedy}")  # fmt: skip


def check_identity(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume a run that began with something else; the first difference is named."""
    for key, value in now.items():
        before, what = saved.get(key), key
        if equal_as_json(before, value):
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            inner = next(k for k in {**value, **before} if not equal_as_json(value.get(k), before.get(k)))
            before, value, what = before.get(inner), value.get(inner), f"{key}.{inner}"
        raise ModelError(
            f"cannot resume: {what} was {before!r} when the run began and is {value!r} now. "
            "Use what the run began with, or start a new run with another -o"
        )


def equal_as_json(a: Any, b: Any) -> bool:
    """Whether two pieces of plain data are the same once written as JSON."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
