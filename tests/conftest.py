from __future__ import annotations

import json
import os
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


# Runs that several files share, trained once for each worker. Who changes one copies it first.


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 short reviews, with a word that decides the label."""
    from tests.training.toy import write_reviews

    return write_reviews(tmp_path_factory.mktemp("reviews") / "reviews.csv")


@pytest.fixture(scope="session")
def train_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains a tiny run on a file, or on rows, which are written beside it; no exits unless asked. -> its directory."""
    from tests.processes import command

    def train(data: Path | Sequence[dict[str, Any]], *words: object) -> Path:
        folder = tmp_path_factory.mktemp("tiny")
        if not isinstance(data, Path):
            (file := folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
            data = file
        if "--exits" not in words:
            words = ("--exits", "none", *words)
        if "--base" not in words:
            words = ("--preset", "tiny", "--epochs", "2", "--set", "vocab_size=200", "--max-length", "32", *words)
        assert command("train", data, "-o", folder / "run", *words) == 0
        return folder / "run"

    return train


@pytest.fixture(scope="session")
def tiny_run(train_tiny: Callable[..., Path], reviews: Path) -> Path:
    """Single-label on the reviews, with its dense twin; it has learnt them."""
    return train_tiny(reviews, "--epochs", "6", "--with-baseline")


@pytest.fixture(scope="session")
def tiny_pairs(train_tiny: Callable[..., Path]) -> Path:
    """Two texts."""
    rows = [{"premise": f"red box {i}", "hypothesis": "blue" if i % 2 else "red", "label": i % 2} for i in range(80)]
    return train_tiny(rows)


@pytest.fixture(scope="session")
def tiny_multi(train_tiny: Callable[..., Path]) -> Path:
    """Several labels."""
    rows = [{"text": f"w{i % 4} x {i}", "labels": [c for c in "ab" if (i + ord(c)) % 3]} for i in range(80)]
    return train_tiny(rows)


@pytest.fixture(scope="session")
def tiny_regression(train_tiny: Callable[..., Path]) -> Path:
    """A number."""
    rows = [{"text": f"w{i % 4} x {i}", "label": (i % 4) / 2} for i in range(80)]
    return train_tiny(rows, "--task", "regression")


@pytest.fixture(scope="session")
def tiny_staged(train_tiny: Callable[..., Path]) -> Path:
    """Words, an exit behind the first layer and the last layer; texts of which words tell most."""
    from tests.training.toy import review_rows

    return train_tiny(review_rows(1200, noise=0.4), "--epochs", "6", "--exits", "1", "--with-baseline")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random encoder with a tokenizer for the reviews."""
    from tests.models.tiny import save_base

    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def tiny_base(train_tiny: Callable[..., Path], reviews: Path, base: Path) -> Path:
    """Head budgets for that encoder; it has learnt the reviews."""
    return train_tiny(reviews, "--base", base, *TINY_BASE)


# Enough for a tiny encoder to learn the reviews.
TINY_BASE = ("--exits", "none", "--set", "model.gates.kind=ranked", "--lr", "0.002", "--epochs", "3", "--set",
             "dense_epochs=3", "--set", "gate_rate=2", "--max-length", "32",
             "--batch-size", "16")  # fmt: skip
