"""Probabilities are as sure as they are right: a temperature is fitted after training, and changes no answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import budgetformer
from budgetformer.engine.scores import Scores, leave_early, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import UsageError
from budgetformer.evaluate import calibration_error, fit_temperatures
from budgetformer.models.config import BudgetFormerConfig
from tests.tables import make_table

SINGLE, MULTI = "single_label_classification", "multi_label_classification"


def made(task: str, heat: float, rows: int = 4000, seed: int = 0) -> Scores:
    """Logits whose probabilities are true, made surer by a factor: the temperature that puts them right."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, 4)) * 1.5
    if task == MULTI:
        labels = (rng.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.uint8)
    else:
        chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        labels = np.array([rng.choice(4, p=row) for row in chances], np.int32)
    table = make_table([1] * rows, [1] * rows, labels)
    heads = np.ones((rows, 2), np.int16)
    return Scores(table, task, 4, (logits * heat).astype(np.float32), heads, None, None)


@pytest.mark.parametrize("task", [SINGLE, MULTI])
@pytest.mark.parametrize("heat", [0.5, 1.0, 3.0])
def test_the_temperature_is_found_and_mends_the_error(task: str, heat: float) -> None:
    scores = made(task, heat)
    assert fit_temperatures(scores)[0] == pytest.approx(heat, rel=0.06)
    fitted = replace(scores, logits=scores.logits / np.float32(fit_temperatures(scores)[0]))
    assert calibration_error(fitted) < 0.02
    if heat != 1:
        assert calibration_error(scores) > 4 * calibration_error(fitted)


def test_a_calibration_error_by_hand() -> None:
    scores = made(SINGLE, 1.0, rows=4)
    sure = np.log([[0.9, 0.1, 1e-9, 1e-9], [0.9, 0.1, 1e-9, 1e-9], [0.4, 0.6, 1e-9, 1e-9], [0.4, 0.6, 1e-9, 1e-9]])
    table = make_table([1] * 4, [1] * 4, np.array([0, 1, 1, 1], np.int32))
    # 0.9 sure and half right, 0.6 sure and all right: the mean of 0.4 and 0.4.
    assert calibration_error(replace(scores, logits=sure.astype(np.float32), table=table)) == pytest.approx(
        0.4, abs=1e-5
    )


def test_a_few_rows_that_are_all_right_prove_no_certainty() -> None:
    table = make_table([1] * 10, [1] * 10, np.zeros(10, np.int32))
    logits = np.tile(np.array([[2.0, 0.0]], np.float32), (10, 1))
    scores = Scores(table, SINGLE, 4, logits, np.ones((10, 2), np.int16), None, None)
    chance = 1 / (1 + math.exp(-2 / fit_temperatures(scores)[0]))
    assert chance == pytest.approx(11 / 12, abs=1e-3)


@pytest.mark.parametrize("kind", ["tiny_run", "tiny_multi", "tiny_base"])
def test_a_run_gives_out_its_temperature_everywhere(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    config = json.loads((folder / "config.json").read_text())
    run = budgetformer.load(folder)
    (temperature,) = config["temperatures"]
    assert temperature != 1
    rows = run.encode(run.held_out(prefer="validation"))
    fitted = score(TorchEngine(run.model), rows)
    assert fit_temperatures(fitted)[0] == pytest.approx(1, abs=2e-3)  # it was fitted to these rows
    run.model.config.temperatures = []
    plain = score(TorchEngine(run.model), rows)
    np.testing.assert_array_equal(plain.logits / np.float32(temperature), fitted.logits)
    if fitted.task == MULTI:
        np.testing.assert_array_equal(plain.probabilities > 0.5, fitted.probabilities > 0.5)
    else:
        np.testing.assert_array_equal(plain.logits.argmax(1), fitted.logits.argmax(1))
    quality = json.loads((folder / "evaluation.json").read_text())["validation"]["quality"]
    assert quality["calibration"].pop("temperatures") == [temperature]
    errors = {"error": calibration_error(fitted), "error_before": calibration_error(plain)}
    assert quality["calibration"] == pytest.approx(errors, abs=1e-6)
    assert f"at a temperature of {temperature} |" in (folder / "README.md").read_text()
    assert "How sure it is" in (folder / "report.html").read_text()


def test_each_stage_has_its_own(tiny_staged: Path) -> None:
    run = budgetformer.load(tiny_staged)
    stages, engine = run.config.stages, TorchEngine(run.model)
    rows = run.encode(run.held_out(prefer="validation"))
    everywhere, learned = score(engine, rows, "exit:0"), score(engine, rows)
    assert run.config.temperatures == fit_temperatures(everywhere)
    assert len(set(run.config.temperatures)) == 3
    assert learned.exits is not None
    assert len(set(learned.exits.tolist())) > 1
    early = leave_early(everywhere, stages, stages.options.limit)
    np.testing.assert_allclose(early.logits, learned.logits, atol=1e-5)
    assert everywhere.stage_logits is not None
    np.testing.assert_array_equal(everywhere.stage_logits[:, -1] / stages.temperatures[-1], everywhere.logits)


def test_regression_has_none_and_it_can_be_left_out(
    tiny_regression: Path, train_tiny: Callable[..., Path], reviews: Path
) -> None:
    off = train_tiny(reviews, "--set", "fit_temperature=false")
    for folder in (tiny_regression, off):
        assert json.loads((folder / "config.json").read_text())["temperatures"] == []
    assert "calibration" not in json.loads((tiny_regression / "evaluation.json").read_text())["test"]["quality"]


def test_training_and_teaching_are_as_without(train_tiny: Callable[..., Path], reviews: Path, base: Path) -> None:
    """The dense model's temperature is not what its student learns from: the weights are the same."""
    words = ("--base", base, "--lr", "0.002", "--epochs", "1", "--set", "dense_epochs=1", "--max-length", "32")
    fitted, plain = (train_tiny(reviews, *words, "--set", f"fit_temperature={word}") for word in ("true", "false"))
    assert (fitted / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_is_above_zero(value: float) -> None:
    with pytest.raises(UsageError, match=r"temperatures=.*give 1, one for each stage, above 0"):
        BudgetFormerConfig.preset("tiny", num_labels=2, temperatures=[value])


def test_a_temperature_is_for_a_stage() -> None:
    with pytest.raises(UsageError, match=r"temperatures=.*give 3, one for each stage"):
        BudgetFormerConfig.preset("tiny", num_labels=2, exits={"layers": [1]}, temperatures=[1.0])
