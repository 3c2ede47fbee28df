"""Width as a user types it: exits and one order of heads and groups together, frozen and as ONNX graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.processes import command

from budgetformer.calibrate import _positions
from budgetformer.evaluate import cost_of
from budgetformer.runs.run import Run

FEW = ["--epochs", "1", "--set", "dense_epochs=1", "--max-length", "16", "--set", "model.gates.kind=order"]


@pytest.fixture(scope="module")
def run(reviews: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("width") / "run"
    assert command("train", reviews, "--base", base, "-o", folder, *FEW, "--set", "model.gates.group_size=16") == 0
    return folder


def test_exits_and_an_order_of_heads_and_groups_are_trained_together(run: Path) -> None:
    evaluation, config = json.loads((run / "evaluation.json").read_text())["test"], Run.open(run).model.config
    assert config.exits
    assert 1 <= config.gates["price_tokens"] < 16  # the mean length of these texts
    assert evaluation["budget"]["groups"] == 3
    assert len(evaluation["budget"]["groups_run_per_layer"]) == config.num_hidden_layers
    assert "feed-forward groups executed" in (run / "README.md").read_text()
    report = (run / "report.html").read_text()
    assert "feed-forward groups" in report
    assert "no head budget could go below" not in report


def test_a_frozen_run_and_graphs_have_the_budgets_units_alone(
    run: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("export", run, "--format", "torch", "--budget", "0.5", "-o", tmp_path / "narrow") == 0
    out = capsys.readouterr().out
    assert " heads, by layer " in out
    assert " of 9 feed-forward groups, by layer " in out
    assert (tmp_path / "narrow/model.safetensors").stat().st_size < (run / "model.safetensors").stat().st_size
    assert not any("allocator" in name for name in load_file(tmp_path / "narrow/model.safetensors"))
    assert command("predict", tmp_path / "narrow", reviews, "-o", tmp_path / "answers.csv", "--budget", "0.6") == 0
    assert command("export", run, "-o", tmp_path / "all", "--budget", "full") == 0
    assert command("export", run, "-o", tmp_path / "graphs") == 0
    narrow, every = (json.loads((tmp_path / name / "export.json").read_text()) for name in ("graphs", "all"))
    assert narrow["bytes"] < every["bytes"]
    assert narrow["model"]["frozen_groups"] == Run.open(tmp_path / "narrow").model.config.frozen_groups
    ratios = []
    for folder in (tmp_path / "graphs", tmp_path / "narrow", tmp_path / "all"):
        capsys.readouterr()
        assert command("eval", folder, reviews, "--json", "--budget", "full") == 0
        ratios.append(json.loads(capsys.readouterr().out)["evaluations"][0]["cost"]["flops_ratio"])
    assert ratios[0] == pytest.approx(ratios[1])
    assert ratios[0] < 0.75 * ratios[2]


def test_groups_that_texts_choose_are_trained_scored_and_frozen_but_not_put_in_graphs(
    reviews: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, gates = tmp_path / "run", ["--set", "model.gates.kind=ranked", "--set", "model.gates.group_size=16"]
    assert command("train", reviews, "--base", base, "-o", run, *FEW, *gates) == 0
    assert json.loads((run / "evaluation.json").read_text())["test"]["budget"]["groups"] == 3
    assert command("export", run, "--format", "torch", "--budget", "0.5", "-o", tmp_path / "narrow") == 0
    capsys.readouterr()
    assert command("export", run, "-o", tmp_path / "graphs") == 2
    assert "a graph cannot choose feed-forward groups by text" in capsys.readouterr().err
    assert command("export", run, "-o", tmp_path / "all", "--budget", "full") == 0


def test_the_default_without_exits_is_walked_and_drawn_by_cost(reviews: Path, base: Path, tmp_path: Path) -> None:
    few = ["--epochs", "1", "--set", "dense_epochs=1", "--max-length", "16", "--exits", "none"]
    assert command("train", reviews, "--base", base, "-o", tmp_path, *few, "--set", "model.gates.keep_heads=true") == 0
    gates = Run.open(tmp_path).model.config.gates
    assert (gates["kind"], gates["group_size"], gates["keep_heads"]) == ("order", 6, True)
    report = (tmp_path / "report.html").read_text()
    assert "Score against cost" in report
    assert "ceiling: if attention cost nothing" not in report
    assert command("calibrate", tmp_path, reviews, "--max-cost", "0.7") == 0
    run = Run.open(tmp_path)
    walked = [position.scores for position in _positions(run.engine(), run.encode(run.held_out(str(reviews))))]
    costs = [cost_of(scores, run.config)["flops_ratio"] for scores in walked]
    assert costs == sorted(costs, reverse=True)
    assert len({float(scores.heads.mean()) for scores in walked}) < len(set(costs))  # heads alone would not order them


def test_wrong_sizes_are_named(reviews: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", reviews, "--base", base, "-o", tmp_path, *FEW, "--set", "model.gates.group_size=-1") == 2
    assert "group_size=-1: give a number that is not negative" in capsys.readouterr().err
    assert command("train", reviews, "--base", base, "-o", tmp_path, *FEW, "--set", "model.gates.group_size=7") == 2
    assert "48 feed-forward neurons: give a size that divides them" in capsys.readouterr().err
