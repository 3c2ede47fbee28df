"""budgetformer check: the findings as text and as JSON, and the exit code."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import budgetformer.cli.check  # noqa: F401 - registers the verb
from budgetformer.cli import app
from budgetformer.data.check import check_data, histogram
from budgetformer.data.locate import DataSource
from budgetformer.data.tokenizer import train_tokenizer


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def write(path: Path, count: int, extra: str = "") -> Path:
    made = "".join(f"{'word ' * (1 + i % 40)}{i},{'ab'[i % 4 == 0]}\n" for i in range(count))
    path.write_text("text,label\n" + made + extra)
    return path


def as_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    report: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if report["usable"] else 3)
    return report


def test_a_clean_file_is_usable(tmp_path: Path) -> None:
    result = run(write(tmp_path / "d.csv", 100))
    assert result.exit_code == 0
    for fragment in (
        "single, text from 'text', label from 'label' (inferred",
        "train  100 rows",
        "75.0%",
        "duplicates 0, bad rows 0",
        "cut at 32:",
        "█",
        "exact with --tokenizer",
        "validation and test will be carved out of train",
    ):
        assert fragment in result.stdout
    assert result.stdout.endswith(f"\nusable; next: budgetformer train {tmp_path}/d.csv -o runs/d\n")


def test_json_says_the_same(tmp_path: Path) -> None:
    report = as_json(write(tmp_path / "d.csv", 100))
    assert (report["usable"], report["errors"], report["task"], report["labels"]) == (True, [], "single", ["a", "b"])
    train = report["splits"]["train"]
    assert (train["rows"], train["classes"]) == (100, {"a": 75, "b": 25})
    assert sum(part["rows"] for part in train["lengths"]) == 100
    assert train["cut"]["32"] > train["cut"]["64"] == 0


def test_the_next_command_trains_on_what_was_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "my data.csv", 40, ",a\n")
    aside, tokenizer = tmp_path / "aside.jsonl", tmp_path / "tok"
    train_tokenizer(["word 0123456789"] * 3, vocab_size=60).save_pretrained(tokenizer)
    flags = ["--text", "text", "--label", "label", "--bad-rows", str(aside), "--offline", "--tokenizer", str(tokenizer)]
    command = shlex.split(as_json(path, *flags)["next"])
    assert command == ["budgetformer", "train", str(path), *flags, "-o", "runs/my data"]
    assert as_json(path)["next"] is None


def test_all_bad_rows_are_counted_and_the_first_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", 50, ",a\n" * 7 + "x,\nto,o,many\n")
    result = run(path)
    assert result.exit_code == 3
    for fragment in ("bad rows 9", "empty text: 7", "no label: 1", "line 52: 'text' is empty", "NOT usable"):
        assert fragment in result.stdout
    assert f"error: {path}: 9 bad rows: fix them or pass --bad-rows skip" in result.stdout
    skipped = as_json(path, "--bad-rows", "skip")
    assert skipped["usable"]
    assert skipped["splits"]["train"]["bad"] == {"empty text": 7, "no label": 1, "wrong number of fields": 1}
    assert len(skipped["splits"]["train"]["first_bad"]) == 5
    assert not list(tmp_path.glob("*.bad.jsonl"))  # checking writes nothing


def test_duplicates_and_leakage(tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", 40, "Twice,a\ntwice ,b\n")
    write(tmp_path / "test.csv", 3)
    report = as_json(tmp_path)
    assert report["splits"]["train"]["duplicates"] == 1
    assert {"split": "test", "other": "train", "rows": 3} in report["leakage"]
    text = run(train, "--test", tmp_path / "test.csv").stdout
    assert "warning: 3 of 3 test rows also occur in train" in text
    assert "warning: 1 of 42 train rows repeat another row of train" in text


def test_one_class_and_unseen_labels_are_errors(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("text,label\nx,a\ny,a\n")
    one = as_json(tmp_path / "one.csv")
    assert not one["usable"]
    assert "every row has the label 'a'" in one["errors"][0]
    assert "2 rows are too few to carve out a validation set and a test set" in one["errors"][1]
    (tmp_path / "test.csv").write_text("text,label\nx,a\ny,never\n")
    unseen = as_json(write(tmp_path / "d.csv", 40), "--test", tmp_path / "test.csv")
    assert not unseen["usable"]
    assert unseen["splits"]["test"]["bad"] == {"label unseen in training": 1}


def test_lengths_are_exact_with_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", 80)
    tokenizer = train_tokenizer(["word 0123456789"] * 3, vocab_size=60)
    tokenizer.save_pretrained(tmp_path / "tok")
    train = check_data(DataSource(str(path)), tokenizer.backend_tokenizer)["splits"]["train"]
    exact = [len(tokenizer(f"{'word ' * (1 + i % 40)}{i}")["input_ids"]) for i in range(80)]
    assert train["lengths"] == histogram({n: exact.count(n) for n in set(exact)})
    assert train["cut"]["32"] == sum(n > 32 for n in exact) / 80 != sum(n >= 32 for n in exact) / 80
    assert "by the tokenizer" in run(path, "--tokenizer", tmp_path / "tok").stdout


def test_endless_words_are_a_warning_with_their_line_and_length(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", 60, f"start {'x' * 300_000} end,a\n")
    warnings = as_json(path)["warnings"]
    where = f"{path}, line 62: 300000 characters without white space"
    assert warnings == [f"{where}: a tokenizer may read them as one unknown word"]
    many = as_json(write(tmp_path / "m.csv", 60, f"{'y' * 1001} z,a\n" * 8))["warnings"]
    assert "3 more rows have such words" in many
    assert len([line for line in many if "1001 characters" in line]) == 5


def test_regression_has_no_classes(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("text,score\n" + "".join(f"t {i},{i / 8}\n" for i in range(30)))
    report = as_json(tmp_path / "d.csv")
    assert (report["task"], report["splits"]["train"]["classes"]) == ("regression", {})


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing-here.csv"], 3, "error: nothing-here.csv: no such file"),
        (["d.csv", "--task", "x"], 2, "error: task is 'x'"),
        (["d.csv", "--tokenizer", "d.csv"], 4, "a tokenizer is a directory"),
    ],
)
def test_errors_are_one_line_with_their_own_exit_code(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from budgetformer.cli import main

    write(tmp_path / "d.csv", 20)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["budgetformer", "check", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_every_field_of_a_source_is_a_flag() -> None:
    from dataclasses import fields

    from budgetformer.cli.data_flags import HELP

    assert {*HELP, "quarantine", "data_dir"} == {field.name for field in fields(DataSource)}


def test_a_file_for_bad_rows_is_given_with_the_flag_that_sets_them_aside(tmp_path: Path) -> None:
    from budgetformer.cli.data_flags import quarantine_fields

    values = DataSource("d.csv", **quarantine_fields(str(tmp_path / "aside.jsonl")))
    assert (values.bad_rows, values.quarantine) == ("skip", str(tmp_path / "aside.jsonl"))
