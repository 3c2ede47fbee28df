"""Budgets of depth from the command line: train, calibrate with guarantees, eval, predict, serve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.processes import command
from tests.training.toy import review_rows

import budgetformer
from budgetformer.calibrate import lower_bound, upper_bound
from budgetformer.data.splits import text_hash
from budgetformer.errors import UsageError
from budgetformer.runs.rows import TRAINING_ROWS


@pytest.fixture(scope="module")
def staged(tiny_staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("depth") / "run"
    shutil.copytree(tiny_staged, folder)
    return folder


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "held_out.jsonl"
    rows = review_rows(700, noise=0.4, seed=9)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_training_fits_words_exits_and_a_rule(tiny_staged: Path) -> None:
    run = budgetformer.load(tiny_staged)
    exits = run.config.exits
    assert exits is not None
    assert run.config.stages.names == ["words", "layer 1", "layer 2"]
    assert len(exits.rule) == 2
    assert [slope <= 0 for _, slope in exits.rule] == [True, True]
    costs, limits = np.array(exits.curve).T
    assert (np.diff(costs) > 0).all()
    assert (np.diff(limits) < 0).all()
    evaluation = json.loads((tiny_staged / "evaluation.json").read_text())
    assert sum(evaluation["test"]["exits"]["share"]) == pytest.approx(1)
    assert evaluation["test"]["cost"]["flops_ratio"] < 0.7
    assert {group["stage"] for group in evaluation["depth"]["reliability"]} == {"words", "layer 1"}
    twin = budgetformer.load(tiny_staged / "baseline")
    assert twin.config.exits is None


def test_a_guarantee_needs_no_labels_and_is_a_budget(
    staged: Path, held_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("calibrate", staged, held_out, "--max-disagreement", "5", "--max-drop", "5", "--json") == 0
    labelled = printed(capsys)
    point = labelled["points"]["max-disagreement-5"]
    assert point["guarantee"] == {"kind": "disagreement", "limit": 0.05, "bound": pytest.approx(
        upper_bound(point["disagreements"], 700, 0.95)), "confidence": 0.95, "rows": 700}  # fmt: skip
    assert point["guarantee"]["bound"] <= 0.05
    assert point["flops_ratio"] < 0.9
    assert labelled["curve"][0]["dial"] == "exit:0"
    assert len({entry["dial"] for entry in labelled["curve"]}) == len(labelled["curve"])
    costs = [entry["flops_ratio"] for entry in labelled["curve"]]
    assert costs == sorted(costs, reverse=True)
    assert [stage["stage"] for stage in labelled["stages"]] == ["words", "layer 1", "layer 2"]
    texts = tmp_path / "texts.csv"
    lines = [json.loads(line)["text"] for line in held_out.read_text().splitlines()]
    texts.write_text("text\n" + "\n".join(lines) + "\n")
    assert command("calibrate", staged, texts, "--max-disagreement", "5", "--json") == 0
    unlabelled = printed(capsys)
    assert unlabelled["points"]["max-disagreement-5"]["dial"] == point["dial"]
    assert "score" not in unlabelled["curve"][0]
    answers = budgetformer.load(staged).predict(lines, budget="max-disagreement-5")
    full = budgetformer.load(staged).predict(lines, budget="exit:0")
    assert sum(a != b for a, b in zip(answers.labels, full.labels, strict=True)) == point["disagreements"]
    assert float(answers.cost.mean()) == pytest.approx(point["flops_ratio"], rel=0.1)
    assert set(answers.exits or ()) <= {"words", "layer 1", "layer 2"}


def test_the_table_says_which_stages_pay(staged: Path, held_out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("calibrate", staged, held_out) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "% left at" in said
    assert "words: 0." in said
    assert "--budget max-disagreement-0.5 is exit:" in said
    assert "at most 0.50 % other labels with 95 % confidence" in said
    assert f"next: budgetformer predict {staged} DATA --budget max-disagreement-0.5" in said


def test_texts_without_labels_that_were_trained_on_promise_nothing(
    staged: Path, held_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, hashes = json.loads((staged / "run.json").read_text())["data"]["data"], load_file(staged / TRAINING_ROWS)
    rows = [json.loads(line)["text"] for line in Path(data).read_text().splitlines()]
    trained = [text for text in rows if text_hash(text, None) in hashes["hashes"]]
    new = [json.loads(line)["text"] for line in held_out.read_text().splitlines()]
    seen, both = tmp_path / "seen.csv", tmp_path / "both.csv"
    seen.write_text("text\n" + "\n".join(trained) + "\n")
    both.write_text("text\n" + "\n".join(trained + new) + "\n")
    ask = ("--max-disagreement", "5", "--json")
    assert command("calibrate", staged, seen, *ask) == 3
    assert f"seen.csv: all of its {len(trained)} rows were seen in training: give others" in capsys.readouterr().err
    assert command("calibrate", staged, both, *ask) == 0
    output = capsys.readouterr()
    assert f"{len(trained)} of {len(trained + new)} rows were seen in training and are left out" in output.err
    assert json.loads(output.out)["points"]["max-disagreement-5"]["guarantee"]["rows"] == len(new)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--max-disagreement", "0.1"),
            "needs at least 2995 rows that the model was not trained on, and there are",
        ),
        (("--max-drop", "0.3"), "--max-drop 0.3 at a confidence of 0.95 needs at least 1228 rows"),
        (("--max-disagreement", "100"), "--max-disagreement 100: give a number above 0 and below 100"),
        (("--confidence", "0.2"), "--confidence 0.2: give a probability"),
    ],
)
def test_guarantees_that_cannot_be_made_are_refused(
    flags: tuple[str, str], message: str, staged: Path, held_out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("calibrate", staged, held_out, *flags) == 2
    assert message in capsys.readouterr().err


def test_rows_that_were_trained_on_are_no_calibration_rows(tiny_staged: Path, staged: Path, tmp_path: Path) -> None:
    run = budgetformer.load(staged)
    trained = json.loads((staged / "run.json").read_text())["data"]["data"]
    assert Path(trained).exists()
    validation = run.rows.held_out(None, prefer="validation", unseen=True)
    everything = run.rows.held_out(None, prefer="validation")
    assert validation.rows.rows == everything.rows.rows // 2  # the exit rule was fitted to the others
    more = tmp_path / "more.jsonl"
    more.write_text(Path(trained).read_text() + "".join(json.dumps(row) + "\n" for row in review_rows(50, 0.1, seed=5)))
    fresh = run.rows.held_out(str(more), unseen=True)
    assert "were seen in training and are left out" in fresh.notes[-1]
    hashes = run.rows.held_out(str(more), "train").rows.rows
    assert fresh.rows.rows < hashes


def test_predict_closes_with_the_exits_and_the_cost_of_eval(
    staged: Path, tiny_run: Path, held_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("eval", staged, held_out, "--budget", "0.4", "--json") == 0
    result = printed(capsys)["evaluations"][0]
    out = tmp_path / "o.jsonl"
    assert command("predict", staged, held_out, "-o", out, "--budget", "0.4") == 0
    shares = "/".join(f"{100 * share:.0f}" for share in result["exits"]["share"])
    cost = f"{100 * result['cost']['flops_ratio']:.1f} % of the dense FLOPs"
    assert f"{cost}, % left at words / layer 1 / layer 2: {shares}, {out}\n" in capsys.readouterr().err
    left = [json.loads(line)["exit"] for line in out.read_text().splitlines()]
    assert [left.count(stage) / len(left) for stage in result["exits"]["stages"]] == result["exits"]["share"]
    assert command("predict", tiny_run, held_out, "--text", "text", "-o", out, "--overwrite") == 0
    assert "left at" not in capsys.readouterr().err


def test_a_share_of_the_cost_is_what_is_spent(staged: Path, held_out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budgets = [word for share in ("0.1", "0.4", "full") for word in ("--budget", share)]
    assert command("eval", staged, held_out, *budgets, "--json") == 0
    evaluations = printed(capsys)["evaluations"]
    spent = [e["cost"]["flops_ratio"] for e in evaluations]
    assert spent[:2] == pytest.approx([0.1, 0.4], abs=0.12)
    assert spent[2] >= 1
    assert evaluations[2]["exits"]["share"] == [0, 0, 1]


def test_predict_writes_exit_and_cost(staged: Path, held_out: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    assert command("predict", staged, held_out, "--text", "text", "-o", output, "--budget", "0.3") == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["exit"] for row in rows} <= {"words", "layer 1", "layer 2"}
    assert all((row["exit"] == "words") == (row["heads"] == 0 and row["cost"] < 0.05) for row in rows)
    assert np.mean([row["cost"] for row in rows]) == pytest.approx(0.3, abs=0.15)


def test_a_share_of_the_cost_needs_exits(tiny_run: Path, held_out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("predict", tiny_run, "--text", "a fine film", "--budget", "0.3") == 2
    assert "budget 0.3: this model has no exits" in capsys.readouterr().err
    with pytest.raises(UsageError, match="this model has no exits"):
        budgetformer.load(tiny_run).predict(["a fine film"], budget=0.3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--exits", "2"), "no text can leave after layer 2; the model has 2 layers"),
        (("--exits", "a"), "exits"),
        (("--exits", "1,1"), "give each layer once"),
    ],
)
def test_exits_that_cannot_be_are_named(
    words: tuple[str, str], message: str, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("train", reviews, "--preset", "tiny", "-o", tmp_path / "run", *words) == 2
    assert message in capsys.readouterr().err


def test_the_bounds_are_exact() -> None:
    """The disagreements that 0.5 % at 95 % allows: none of 600, 4 of 2,000, 16 of 5,000, 38 of 10,000."""
    for allowed, rows in ((0, 600), (4, 2000), (16, 5000), (38, 10000)):
        assert upper_bound(allowed, rows, 0.95) <= 0.005 < upper_bound(allowed + 1, rows, 0.95)
    assert upper_bound(5, 5, 0.95) == 1
    assert lower_bound(0, 100, 0.95) == 0
    assert lower_bound(30, 100, 0.95) == pytest.approx(1 - upper_bound(70, 100, 0.95))


async def _served(folder: Path, texts: list[str]) -> tuple[Any, Any, str, Any]:
    from tests.serving.toy import running

    from budgetformer.serving.server import build
    from budgetformer.serving.settings import Settings

    async with running(build(Settings(folder))) as client:
        _, quick = await client.json("/predict", {"texts": texts, "budget": "0"})
        _, full = await client.json("/predict", {"texts": texts, "budget": "full"})
        metrics = (await client.send("GET", "/metrics"))[2]
        refused = await client.json("/predict", {"texts": texts, "budget": "0.3.1"})
    return quick, full, metrics.decode() if isinstance(metrics, bytes) else metrics, refused


def test_the_service_takes_budgets_of_depth_and_counts_exits(staged: Path) -> None:
    import asyncio

    texts = ["a superb story of a town", "a dull film with great people"]
    quick, full, metrics, refused = asyncio.run(_served(staged, texts))
    assert [p["exit"] for p in quick["predictions"]] == ["words", "words"]
    assert all(p["cost"] < 0.05 and p["heads"]["used"] == 0 for p in quick["predictions"])
    assert [p["exit"] for p in full["predictions"]] == ["layer 2", "layer 2"]
    assert all(p["cost"] >= 1 for p in full["predictions"])
    assert 'budgetformer_exits_total{stage="words"} 2.0' in metrics
    assert refused[0] == 422
