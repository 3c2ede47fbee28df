"""Which rows a run is evaluated on: data is known by what it holds, not by its name."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.processes import command
from tests.training.toy import write_reviews

from budgetformer import Run
from budgetformer.data.locate import DataSource
from budgetformer.errors import DataError, ModelError
from budgetformer.evaluate import Evaluation
from budgetformer.export.verify import CheckRows
from budgetformer.training.record import DIALS, dial_point


def hashes(run: Run, data: object) -> set[int]:
    rows = run.held_out(data)  # type: ignore[arg-type]
    return set(rows.data.splits[rows.split].hashes.tolist())


def kept_back(run: Run) -> set[int]:
    rows = run.held_out()
    assert rows.split == "test"
    return set(rows.data.splits["test"].hashes.tolist())


def test_the_runs_own_file_is_known_by_its_content(
    tiny_run: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open(tiny_run)
    expected = kept_back(run)
    assert len(expected) == 20
    monkeypatch.chdir(reviews.parent)
    copy = shutil.copy(reviews, tmp_path / "another-name.csv")
    for name in (reviews.name, f"./{reviews.name}", str(reviews), str(copy)):
        assert hashes(run, name) == hashes(run, DataSource(name)) == expected
    held_out = run.held_out(str(copy), prefer="validation")
    assert held_out.split == "validation"
    assert not set(held_out.data.splits["validation"].hashes.tolist()) & expected


def test_a_relative_path_is_found_from_another_directory(
    tiny_run: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = kept_back(Run.open(tiny_run))
    folder = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    record = json.loads((folder / "run.json").read_text())
    assert record["data_path"] == str(reviews.resolve())
    (folder / "run.json").write_text(json.dumps({**record, "data": {**record["data"], "data": reviews.name}}))
    monkeypatch.chdir(tmp_path)
    assert kept_back(Run.open(folder)) == expected


def test_of_a_training_file_that_grew_the_new_rows_are_left(tiny_run: Path, reviews: Path, tmp_path: Path) -> None:
    run = Run.open(tiny_run)
    grown = tmp_path / "grown.csv"
    with reviews.open(encoding="utf-8", newline="") as old, grown.open("w", encoding="utf-8", newline="") as new:
        rows = list(csv.reader(old))
        csv.writer(new).writerows([*rows, *([f"{row[0]} {n}", row[1]] for n, row in enumerate(rows[1:11]))])
    held_out = run.held_out(str(grown))
    seen, total = run.record["splits"]["train"], len(rows) + 9
    assert any(f"{seen} of {total} rows were seen in training and are left out" in note for note in held_out.notes)
    assert held_out.data.splits[held_out.split].rows == total - seen
    train = run.held_out(str(grown), split="train")  # asked for by name, they are given
    assert train.data.splits["train"].rows == total
    assert any(note == f"{seen} of {total} rows were seen in training" for note in train.notes)


def test_other_data_is_taken_as_it_is_and_what_was_seen_is_said(tiny_run: Path, reviews: Path, tmp_path: Path) -> None:
    run = Run.open(tiny_run)
    other = write_reviews(tmp_path / "other.csv", rows=40, seed=5)
    few = tmp_path / "few.csv"
    few.write_text("".join(reviews.read_text(encoding="utf-8").splitlines(keepends=True)[:21]), encoding="utf-8")
    rows = run.held_out(str(few))
    assert rows.data.splits[rows.split].rows == 20
    assert any("of 20 rows were seen in training" in note for note in rows.notes)
    assert run.held_out(str(other)).data.splits["test"].rows == 40


def test_rows_that_were_all_trained_on_are_refused(tiny_run: Path, tmp_path: Path, reviews: Path) -> None:
    run = Run.open(tiny_run)
    train = run.held_out().data.splits["train"]
    only = tmp_path / "train.csv"
    with only.open("w", encoding="utf-8", newline="") as file:
        names = reviews.read_text(encoding="utf-8").splitlines()[0].split(",")
        csv.writer(file).writerows([names, *([e.text, e.label] for e in train.examples())])
    with pytest.raises(DataError, match="were seen in training: give others"):
        run.held_out(str(only))


def test_eval_and_calibrate_heed_the_limit_and_take_no_flag_that_does_nothing(
    tiny_run: Path, reviews: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("eval", tiny_run, reviews, "--json") == 0
    assert json.loads(capsys.readouterr().out)["evaluations"][0]["rows"] == 20
    assert command("eval", tiny_run, reviews, "--limit", "8", "--json") == 0
    result = json.loads(capsys.readouterr().out)["evaluations"][0]
    assert result["rows"] == 8
    assert all(row["text"] for row in result["hardest"])
    assert command("calibrate", tiny_run, reviews, "--limit", "6", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 6
    (tiny_run / "calibration.json").unlink()
    for verb, flag in itertools.product(("eval", "calibrate"), ("--seed", "--task", "--test-fraction")):
        assert command(verb, tiny_run, reviews, flag, "1") == 2  # they have no effect there, so they are unknown


def test_a_sample_comes_from_all_over_a_file_that_is_sorted_by_class(tiny_run: Path, tmp_path: Path) -> None:
    run, made = Run.open(tiny_run), write_reviews(tmp_path / "made.csv", rows=60, seed=7)
    header, *lines = made.read_text(encoding="utf-8").splitlines(keepends=True)
    made.write_text(header + "".join(sorted(lines, key=lambda line: line.strip().rsplit(",", 1)[1])), encoding="utf-8")
    rows = run.held_out(str(made)).sample(10)
    labels = [example.label for example in rows.data.splits[rows.split].examples()]
    assert len(labels) == 10
    assert set(labels) == set(run.labels)


def test_curve_and_export_see_every_class_of_a_test_file_that_is_sorted_by_class(
    train_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, *lines = write_reviews(tmp_path / "made.csv", rows=60, seed=7).read_text(encoding="utf-8").splitlines()
    ranked = tmp_path / "ranked.csv"
    ranked.write_text("\n".join([header, *sorted(lines, key=lambda line: line.rsplit(",", 1)[1])]), encoding="utf-8")
    seen: list[list[str]] = []  # the classes of the rows that each figure of the curve and the export's check are from

    def point(evaluation: Evaluation) -> dict[str, Any]:
        seen.append([each["label"] for each in evaluation.quality["per_class"] if each["rows"]])
        return dial_point(evaluation)

    def export(*_: Any, rows: CheckRows, **options: Any) -> dict[str, Any]:
        seen.append([run.labels[label] for label in set(rows.table.labels)])  # type: ignore[arg-type]
        return {}

    monkeypatch.setattr("budgetformer.training.record._CURVE_ROWS", 10)
    monkeypatch.setattr("budgetformer.training.record.dial_point", point)
    run = Run.open(train_tiny(write_reviews(tmp_path / "train.csv"), "--test", ranked, "--epochs", "1"))
    monkeypatch.setattr("budgetformer.runs.run._CHECK_ROWS", 10)
    monkeypatch.setattr(import_module("budgetformer.export.run"), "export_model", export)
    run.export(tmp_path / "onnx")
    assert [sorted(labels) for labels in seen] == [sorted(run.labels)] * (len(DIALS) + 3)


@pytest.mark.parametrize("version", [None, 99])
def test_a_run_of_another_format_is_refused(version: int | None, tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder, ignore=shutil.ignore_patterns("checkpoints", "baseline"))
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    record["format_version"] = version
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ModelError, match=r"reads version 1: train the run again"):
        Run.open(folder)


@pytest.mark.parametrize("verb", ["eval", "calibrate"])
def test_eval_and_calibrate_name_the_rows_that_they_score(
    verb: str, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = tmp_path / "run", tmp_path / "new.csv"
    shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns("checkpoints"))
    file.write_text("review,sentiment\nsuperb in every way,pos\ndull in every way,neg\nlovely and new,pos\n")
    assert command(verb, run, file) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"on 3 test rows of {file}"[:40] in out
    assert "train rows" not in out
