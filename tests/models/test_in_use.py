"""A retrofitted run behind the verbs that put runs to use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from budgetformer.dial import Dial
from budgetformer.runs.run import Run
from budgetformer.serving.service import Engine
from budgetformer.serving.settings import Settings
from tests.cli.test_train import command
from tests.models.tiny import save_base
from tests.training.toy import write_reviews

TEXTS = ["a superb story of town", "the dull film of people with music", "lovely"]


@pytest.fixture(scope="module", params=["whole", "delta"])
def run(
    request: pytest.FixtureRequest, reviews: Path, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("retrofit")
    if request.param == "whole":
        shutil.copytree(tiny_base, folder / "run")
        shutil.copy(reviews, folder / "reviews.csv")
        return folder / "run"
    base, reviews = save_base(folder / "base"), write_reviews(folder / "reviews.csv", rows=60)
    few = [
        "--exits",
        "none",
        "--set",
        "model.gates.kind=ranked",
        "--epochs",
        "1",
        "--max-length",
        "16",
        "--set",
        "dense_epochs=1",
    ]
    assert (
        command("train", str(reviews), "--base", str(base), "-o", str(folder / "run"), *few, "--set", "delta=true") == 0
    )
    return folder / "run"


def test_it_is_served_with_its_own_dial(run: Path) -> None:
    engine = Engine(Settings(run, budget="mean:0.5"))
    engine.self_test()
    table = engine.encode([("a superb story of town", None)])
    half, every = (
        next(engine.answers(engine.score(table, dial)))["heads"]["used"] for dial in (engine.budget, Dial("full"))
    )
    assert half < every == engine.possible
    explanation = engine.explainer.explain("a superb story of town", budget=engine.budget)
    assert sum(layer["k"] for layer in explanation["layers"]) == half
    assert explanation["flops"]["used"] < explanation["flops"]["dense"]
    shown = engine.explainer.attention("a superb story of town", None, 1, 2, engine.budget)
    assert sum(shown["map"][0]) == pytest.approx(1, abs=0.01)


def test_it_is_explained_in_a_file(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "heads.html"
    assert command("explain", str(run), "--text", "a superb story", "-o", str(page)) == 0
    assert "<html" in page.read_text(encoding="utf-8")


def test_it_is_exported(run: Path, tmp_path: Path) -> None:
    assert command("export", str(run), "-o", str(tmp_path / "out"), "--budget", "mean:0.5") == 0
    ours, theirs = Run.open(tmp_path / "out").predict(TEXTS), Run.open(run).predict(TEXTS, budget="mean:0.5")
    assert ours.labels == theirs.labels
    np.testing.assert_array_equal(ours.heads, theirs.heads)


def test_its_points_are_used_by_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("calibrate", str(run), str(run.parent / "reviews.csv"), "--max-cost", "0.9") == 0
    capsys.readouterr()
    assert command("predict", str(run), "--text", "a superb story", "--budget", "max-cost-0.9", "--json") == 0
    assert json.loads(capsys.readouterr().out)["heads"] < 1
