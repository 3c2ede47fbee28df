"""What the tests of predictions share: a run, and windows so small that files have several."""

from __future__ import annotations

from pathlib import Path

import pytest

from budgetformer.predict import input as rows
from budgetformer.predict.job import Predictor
from budgetformer.runs.run import Run
from tests.predict.toy import make_run


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "WINDOW_ROWS", 8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def predictor(run: Path) -> Predictor:
    return Predictor(Run.open(run))
