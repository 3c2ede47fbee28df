from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for the network
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # as the commands do in a process of their own
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
torch.set_num_threads(1)  # tiny models; and several test runs may share a machine
settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# Files that take longest, in this order: they are begun first, so that both workers end at about the same time.
SLOWEST = ("test_docs", "test_train", "test_same_answers", "test_estimator", "test_results", "test_server", "test_base",
           "test_cluster", "test_house", "test_stages", "test_reproduce", "test_damage", "test_bench", "test_grid",
           "test_examples", "test_report", "test_render", "test_page", "test_speed", "test_connections", "test_depth",
           "test_loop", "test_without_torch")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish() -> None:
    gc.freeze()  # every training collects garbage, and need not look through all that was imported


# Runs that several files share, trained once for all workers; each has a copy. Who changes one copies it first.


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Has a directory of this name filled by one worker, while others that need it wait. -> the directory."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def get(name: str, fill: Callable[[Path], object]) -> Path:
        folder, filled = root / name, root / f"{name}.filled"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not filled.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                folder.mkdir()
                fill(folder)
                filled.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def reviews(once: Callable[..., Path]) -> Path:
    """200 short reviews, with a word that decides the label."""
    from tests.training.toy import write_reviews

    return once("reviews", lambda folder: write_reviews(folder / "reviews.csv")) / "reviews.csv"


def train_in(folder: Path, data: Path | Sequence[dict[str, Any]], *words: object) -> Path:
    from tests.processes import command

    if not isinstance(data, Path):
        (file := folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        data = file
    if "--exits" not in words:
        words = ("--exits", "none", *words)
    if "--base" not in words:
        words = ("--preset", "tiny", "--epochs", "2", "--set", "vocab_size=200", "--max-length", "32", *words)
    assert command("train", data, "-o", folder / "run", *words) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def train_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains a tiny run on a file, or on rows, which are written beside it; no exits unless asked. -> its directory."""
    return lambda *arguments: train_in(tmp_path_factory.mktemp("tiny"), *arguments)


@pytest.fixture(scope="session")
def train_once(once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The same for all workers, under a name. -> this worker's copy."""

    def train(name: str, *arguments: Any) -> Path:
        made = once(name, lambda folder: train_in(folder, *arguments))
        return Path(shutil.copytree(made / "run", tmp_path_factory.mktemp(name) / "run"))

    return train


@pytest.fixture(scope="session")
def tiny_run(train_once: Callable[..., Path], reviews: Path) -> Path:
    """Single-label on the reviews, with its dense twin; it has learnt them."""
    return train_once("tiny_run", reviews, "--epochs", "6", "--with-baseline")


@pytest.fixture(scope="session")
def tiny_pairs(train_once: Callable[..., Path]) -> Path:
    """Two texts."""
    rows = [{"premise": f"red box {i}", "hypothesis": "blue" if i % 2 else "red", "label": i % 2} for i in range(80)]
    return train_once("tiny_pairs", rows)


@pytest.fixture(scope="session")
def tiny_multi(train_once: Callable[..., Path]) -> Path:
    """Several labels."""
    rows = [{"text": f"w{i % 4} x {i}", "labels": [c for c in "ab" if (i + ord(c)) % 3]} for i in range(80)]
    return train_once("tiny_multi", rows)


@pytest.fixture(scope="session")
def tiny_regression(train_once: Callable[..., Path]) -> Path:
    """A number."""
    rows = [{"text": f"w{i % 4} x {i}", "label": (i % 4) / 2} for i in range(80)]
    return train_once("tiny_regression", rows, "--task", "regression")


@pytest.fixture(scope="session")
def tiny_staged(train_once: Callable[..., Path]) -> Path:
    """Words, an exit after the first layer and the last layer; texts of which words tell most."""
    from tests.training.toy import review_rows

    return train_once("tiny_staged", review_rows(1200, noise=0.4), "--epochs", "6", "--exits", "1", "--with-baseline")


@pytest.fixture(scope="session")
def base(once: Callable[..., Path]) -> Path:
    """A tiny random encoder with a tokenizer for the reviews."""
    from tests.models.tiny import save_base

    return once("base", save_base)


@pytest.fixture(scope="session")
def tiny_base(train_once: Callable[..., Path], reviews: Path, base: Path) -> Path:
    """Head budgets for that encoder; it has learnt the reviews."""
    return train_once("tiny_base", reviews, "--base", base, *TINY_BASE)


# Enough for a tiny encoder to learn the reviews.
TINY_BASE = ("--exits", "none", "--set", "model.gates.kind=ranked", "--lr", "0.002", "--epochs", "3", "--set",
             "dense_epochs=3", "--set", "gate_rate=2", "--max-length", "32",
             "--batch-size", "16")  # fmt: skip
