"""train --unlabelled: texts that the fine-tuned encoder labels, and trains on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.processes import command
from tests.training.toy import write_reviews

from budgetformer.data.dataset import open_data
from budgetformer.data.locate import DataSource
from budgetformer.runs.run import Run
from budgetformer.training.prepare import prepare
from budgetformer.training.pretrained import build_budgeted
from budgetformer.training.recipe import Recipe

FAST = (
    "--exits",
    "1",
    "--set",
    "model.gates.kind=all",
    "--epochs",
    "1",
    "--set",
    "dense_epochs=0",
    "--max-length",
    "32",
    "--batch-size",
    "16",
)
NEW, OLD = 48, 30


@pytest.fixture(scope="module")
def texts(reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """New texts, and some that are validation and test rows of the reviews."""
    folder = tmp_path_factory.mktemp("unlabelled")
    known = [row.text for split in open_data(DataSource(str(reviews))).splits.values() for row in split.examples()]
    new = [f"{known[i]} number{i}" for i in range(NEW)]
    (file := folder / "more.jsonl").write_text("".join(json.dumps({"review": t}) + "\n" for t in (*new, *known[-OLD:])))
    return file


@pytest.fixture(scope="module")
def run(reviews: Path, tiny_base: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ("--base", tiny_base / "baseline", *FAST)
    assert command("train", reviews, "-o", folder, "--unlabelled", texts, *words) == 0
    return folder


def test_they_are_labelled_by_the_dense_model(reviews: Path, tiny_base: Path, texts: Path, tmp_path: Path) -> None:
    dense = tiny_base / "baseline"
    recipe = Recipe.make(base=str(dense), max_length=32, model={"gates": {"kind": "order"}})
    source = DataSource(str(reviews), unlabelled=str(texts))
    prepared = prepare(source, recipe, tmp_path, lambda line: None)
    model, teacher, rows = build_budgeted(prepared, recipe, dense)
    labelled = prepared.splits["train"]
    assert rows is not None
    assert rows.labels is not None
    assert labelled.labels is not None
    assert len(rows) == len(teacher) == len(labelled) + NEW  # type: ignore[arg-type]
    np.testing.assert_array_equal(rows.labels[: len(labelled)], labelled.labels)
    new = [json.loads(line)["review"] for line in texts.read_text().splitlines()][:NEW]
    answers = Run.open(dense).predict(new)
    assert [model.config.label_names[number] for number in rows.labels[len(labelled) :]] == list(answers.labels)
    assert isinstance(teacher, np.ndarray)
    np.testing.assert_array_equal(teacher[len(labelled) :].argmax(axis=1), rows.labels[len(labelled) :])


def test_the_run_says_how_many_and_trains_on_them(run: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((run / "run.json").read_text())
    assert record["unlabelled_rows"] == NEW
    assert record["training"]["steps"] == -(-(record["splits"]["train"] + NEW) // 16)
    assert len(load_file(run / "training_rows.safetensors")["unlabelled"]) == NEW
    assert command("calibrate", run, texts, "--max-disagreement", "50", "--confidence", "0.5") == 0
    assert f"{NEW} of {NEW + OLD} rows were seen in training and are left out" in capsys.readouterr().err


def test_a_run_goes_on_with_the_same_texts_only(
    run: Path, reviews: Path, tiny_base: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", reviews, "-o", run, "--base", tiny_base / "baseline", *FAST, "--resume")
    assert command(*words, "--unlabelled", texts) == 0
    other = write_reviews(tmp_path / "other.csv", rows=20, seed=9)
    capsys.readouterr()
    assert command(*words, "--unlabelled", other) == 4
    assert "unlabelled" in capsys.readouterr().err


def test_what_cannot_be_is_refused(
    reviews: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", reviews, "-o", tmp_path / "run", "--unlabelled")
    assert command(*words, reviews, "--preset", "tiny") == 2
    assert "--unlabelled needs --base: the fine-tuned encoder labels those rows" in capsys.readouterr().err
    assert command(*words, reviews, "--base", base, *FAST) == 3
    assert "reviews.csv has no text that is not in the training, validation or test rows" in capsys.readouterr().err
    assert command(*words, tmp_path / "none.csv", "--base", base, *FAST) == 3
    assert "none.csv" in capsys.readouterr().err
    (bad := tmp_path / "bad.jsonl").write_text('{"review": "fine"}\n{"review": 3}\n')
    assert command(*words, bad, "--base", base, *FAST) == 3
    assert "bad.jsonl, line 2" in capsys.readouterr().err


def test_bad_rows_of_both_files_are_set_aside(
    reviews: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text(reviews.read_text() + ",pos\n")  # a row without a text
    (tmp_path / "more.jsonl").write_text('{"review": "new"}\n{"review": 2}\n')
    words = ("--base", tiny_base / "baseline", *FAST, "--bad-rows", "aside.jsonl")
    assert command("train", "data.csv", "-o", "run", "--unlabelled", "more.jsonl", *words) == 0
    assert "data.csv" in (tmp_path / "aside.jsonl").read_text()
    assert "more.jsonl" in (tmp_path / "aside.unlabelled.jsonl").read_text()
    err = capsys.readouterr().err
    for file in ("aside.jsonl (1 empty text)", "aside.unlabelled.jsonl (1 text is no string)"):
        assert err.count(f"warning: 1 bad rows set aside in {file}\n") == 1
