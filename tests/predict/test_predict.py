"""budgetformer predict as a user types it: every format in and out, what is added, and every wrong way."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from budgetformer.data.locate import DataSource
from budgetformer.predict.job import Predictor, Request
from budgetformer.runs.run import Run
from tests.cli.test_train import command
from tests.predict.toy import make_rows, make_run

ROWS = make_rows(50)


@pytest.fixture(scope="module")
def pair_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "pairs", ("premise", "hypothesis"))


def write(path: Path, table: list[dict[str, Any]]) -> Path:
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
        return path
    if kind == "jsonl":
        text = "".join(json.dumps(row) + "\n" for row in table)
    else:
        out = io.StringIO()
        writer = csv.DictWriter(out, list(table[0]), delimiter="\t" if kind == "tsv" else ",")
        writer.writeheader()
        writer.writerows(table)
        text = out.getvalue()
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(path: Path) -> list[dict[str, Any]]:
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if kind == "jsonl":
        return [json.loads(line) for line in data.decode().splitlines()]
    return list(csv.DictReader(io.StringIO(data.decode(), newline=""), delimiter="\t" if kind == "tsv" else ","))


@pytest.mark.parametrize("source", ["d.csv", "d.tsv", "d.jsonl", "d.csv.gz", "d.parquet"])
@pytest.mark.parametrize("target", ["o.csv", "o.tsv", "o.jsonl", "o.csv.gz", "o.jsonl.gz", "o.parquet"])
def test_every_format_goes_into_every_other(predictor: Predictor, tmp_path: Path, source: str, target: str) -> None:
    data, out = write(tmp_path / source, ROWS), tmp_path / target
    assert predictor.predict(Request(DataSource(str(data)), out), print)
    got = read(out)
    assert list(got[0]) == ["id", "text", "note", "label", "score", "heads", "cut"]
    assert [str(row["id"]) for row in got] == [str(row["id"]) for row in ROWS]
    assert [row["note"] for row in got] == [row["note"] for row in ROWS]
    if source in ("d.jsonl", "d.parquet") and target in ("o.jsonl", "o.jsonl.gz", "o.parquet"):
        assert [row["id"] for row in got] == [row["id"] for row in ROWS]
    scores = predictor.scorer.score([row["text"] for row in ROWS])
    labels = np.array(["neg", "pos", "none"])[scores.probabilities.argmax(1)]
    assert [row["label"] for row in got] == labels.tolist()
    np.testing.assert_allclose([float(row["score"]) for row in got], scores.probabilities.max(1), atol=2e-6)
    np.testing.assert_allclose([float(row["heads"]) for row in got], scores.head_share, atol=1e-6)
    assert [str(row["cut"]).lower() for row in got] == [str(cut).lower() for cut in scores.table.truncated.tolist()]
    assert 0 < scores.table.truncated.sum() < len(ROWS)
    assert {path.name for path in tmp_path.iterdir()} == {source, target}


def test_parquet_keeps_its_types(run: Path, tmp_path: Path) -> None:
    schema = pyarrow.schema([("n", pyarrow.int16()), ("text", pyarrow.string()), ("when", pyarrow.date32())])
    table = pyarrow.Table.from_pylist([{"n": 1, "text": "a film", "when": None}] * 20, schema)
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    assert command("predict", str(run), str(tmp_path / "d.parquet"), "-o", str(tmp_path / "o.parquet")) == 0
    schema_written = pyarrow.parquet.read_schema(tmp_path / "o.parquet")
    assert [schema_written.field(name).type for name in schema.names] == schema.types
    assert [str(schema_written.field(name).type) for name in ("label", "score", "cut")] == ["string", "double", "bool"]


def test_rows_of_different_shapes(run: Path, tmp_path: Path) -> None:
    table = [{"text": "a film", "tags": ["x"]}] * 10 + [{"text": "a story", "tags": [], "more": 1.5}] * 10
    data = write(tmp_path / "d.jsonl", table)
    for target in ("o.jsonl", "o.parquet"):
        assert command("predict", str(run), str(data), "-o", str(tmp_path / target)) == 0
        got = read(tmp_path / target)
        assert got[0]["tags"] == ["x"]
        assert [row.get("more") for row in got] == [row.get("more") for row in table]


def test_top_and_probabilities(run: Path, tmp_path: Path) -> None:
    data, out = write(tmp_path / "d.csv", ROWS), tmp_path / "o.jsonl"
    assert command("predict", str(run), str(data), "-o", str(out), "--top", "2", "--probabilities") == 0
    names = ["label", "score", "label_2", "score_2", "p_neg", "p_pos", "p_none", "heads", "cut"]
    for row in read(out):
        assert list(row)[3:] == names
        chances = {name[2:]: value for name, value in row.items() if name.startswith("p_")}
        assert sum(chances.values()) == pytest.approx(1, abs=3e-6)
        best = sorted(chances, key=chances.__getitem__, reverse=True)
        assert [row["label"], row["label_2"]] == best[:2]
        assert [row["score"], row["score_2"]] == [chances[label] for label in best[:2]]


def test_a_name_that_is_taken_gets_a_prefix(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write(tmp_path / "d.csv", [{"text": "a film", "label": "gold", "cut": "x"}]), tmp_path / "o.csv"
    assert command("predict", str(run), str(data), "-o", str(out)) == 0
    assert list(read(out)[0]) == ["text", "label", "cut", "predicted_label", "score", "heads", "predicted_cut"]
    assert read(out)[0]["label"] == "gold"
    assert "label as predicted_label, cut as predicted_cut" in capsys.readouterr().err


def test_multi_label_and_regression(tmp_path: Path) -> None:
    data = write(tmp_path / "d.csv", ROWS)
    multi = make_run(tmp_path / "multi", problem_type="multi_label_classification")
    assert command("predict", str(multi), str(data), "-o", str(tmp_path / "m.jsonl"), "--probabilities") == 0
    for row in read(tmp_path / "m.jsonl"):
        above = [label for label in ("neg", "pos", "none") if row[f"p_{label}"] > 0.5]
        assert row["label"] == above
        assert row["score"] == [row[f"p_{label}"] for label in above]
    assert command("predict", str(multi), str(data), "-o", str(tmp_path / "m.csv")) == 0
    assert [json.loads(row["label"]) for row in read(tmp_path / "m.csv")] == [
        row["label"] for row in read(tmp_path / "m.jsonl")
    ]
    assert command("predict", str(multi), str(data), "-o", str(tmp_path / "m.parquet")) == 0
    numbers = make_run(tmp_path / "numbers", problem_type="regression", id2label={0: "x"}, label2id={"x": 0})
    assert command("predict", str(numbers), str(data), "-o", str(tmp_path / "n.jsonl")) == 0
    values = Run.open(numbers).scorer().score([row["text"] for row in ROWS]).probabilities[:, 0]
    assert list(read(tmp_path / "n.jsonl")[0])[3:] == ["score", "heads", "cut"]
    np.testing.assert_allclose([row["score"] for row in read(tmp_path / "n.jsonl")], values, rtol=1e-5)


def test_pairs_are_read_from_the_columns_of_the_run(pair_run: Path, tmp_path: Path) -> None:
    table = [{"hypothesis": f"a film {n}", "premise": "the story"} for n in range(10)]
    data, out = write(tmp_path / "d.jsonl", table), tmp_path / "o.jsonl"
    assert command("predict", str(pair_run), str(data), "-o", str(out)) == 0
    scores = Run.open(pair_run).scorer().score(["the story"] * 10, [row["hypothesis"] for row in table])
    np.testing.assert_allclose([row["score"] for row in read(out)], scores.probabilities.max(1), atol=2e-6)


def test_one_text(run: Path, pair_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("predict", str(run), "--text", "a great film") == 0
    assert capsys.readouterr().out.split()[:1] == ["label"]
    assert command("predict", str(pair_run), "--text", "a film", "--text-pair", "a story", "--json", "--top", "3") == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["label", "score", "label_2", "score_2", "label_3", "score_3", "heads", "cut"]


def test_standard_input_and_output(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert command("predict", str(run), "-") == 0
    out, err = capsysbinary.readouterr()
    assert [json.loads(line)["id"] for line in out.splitlines()] == list(range(50))
    assert b"50 rows" in err


def test_a_folder_is_its_files_in_order_and_a_data_set_its_test_rows(run: Path, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(3):
        write(tmp_path / "many" / f"part-{number}.jsonl", ROWS[number * 10 : number * 10 + 10])
    (tmp_path / "many" / "README.md").write_text("no data")
    assert command("predict", str(run), str(tmp_path / "many"), "-o", str(tmp_path / "o.jsonl")) == 0
    assert [row["id"] for row in read(tmp_path / "o.jsonl")] == list(range(30))
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.csv", ROWS[:10])
    write(tmp_path / "set" / "test.csv", ROWS[10:14])
    assert command("predict", str(run), str(tmp_path / "set"), "-o", str(tmp_path / "t.csv")) == 0
    assert [row["id"] for row in read(tmp_path / "t.csv")] == ["10", "11", "12", "13"]
    argv = ["predict", str(run), str(tmp_path / "set"), "--split", "train", "-o", str(tmp_path / "s.csv")]
    assert command(*argv) == 0
    assert len(read(tmp_path / "s.csv")) == 10


@pytest.mark.parametrize("target", ["o.jsonl", "o.csv", "o.csv.gz"])
def test_shards_in_order_are_the_output_of_one_go(run: Path, tmp_path: Path, target: str) -> None:
    data = write(tmp_path / "d.jsonl", ROWS)
    assert command("predict", str(run), str(data), "-o", str(tmp_path / target)) == 0
    parts = []
    for number in (1, 2, 3):
        out = tmp_path / f"{number}-{target}"
        assert command("predict", str(run), str(data), "-o", str(out), "--shard", f"{number}/3") == 0
        parts.append(out.read_bytes())
    assert all(parts)
    assert b"".join(parts) == (tmp_path / target).read_bytes()


def test_more_shards_than_windows_leave_some_empty(run: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "d.parquet", ROWS[:10])
    sizes = []
    for number in range(1, 5):
        out = tmp_path / f"{number}.parquet"
        assert command("predict", str(run), str(data), "-o", str(out), "--shard", f"{number}/4") == 0
        sizes.append(len(read(out)))
    assert sorted(sizes) == [0, 0, 2, 8]


def test_bad_rows_are_set_aside_beside_the_output(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "a film"}\n{"text": ""}\n{broken\n{"text": "a story"}\n')
    out = tmp_path / "o.csv"
    assert command("predict", str(run), str(data), "-o", str(out), "--bad-rows", "skip") == 0
    assert [row["text"] for row in read(out)] == ["a film", "a story"]
    aside = [json.loads(line) for line in (tmp_path / "o.csv.bad.jsonl").read_text().splitlines()]
    assert [row["line"] for row in aside] == [2, 3]
    assert "2 rows" in (err := capsys.readouterr().err)
    assert "2 bad rows set aside" in err


def test_no_usable_row_leaves_the_header(run: Path, tmp_path: Path) -> None:
    data, out = write(tmp_path / "d.csv", [{"text": "", "id": 1}] * 3), tmp_path / "o.csv"
    assert command("predict", str(run), str(data), "-o", str(out), "--bad-rows", "skip") == 0
    assert out.read_text() == "text,id,label,score,heads,cut\n"


@pytest.mark.parametrize("target", ["o.csv", "o.tsv.gz"])
def test_cells_that_a_spreadsheet_would_compute_are_escaped_if_asked(run: Path, tmp_path: Path, target: str) -> None:
    notes = ["=1+1", "+cmd", "-2.5e3", "-x", "@SUM(A1)", "\tx", "\rx", "fine", "a=b", "", "+1-1"]
    table = [{"text": "a film", "note": note, "=column": number} for number, note in enumerate(notes)]
    data, plain, out = write(tmp_path / "d.jsonl", table), tmp_path / f"plain-{target}", tmp_path / target
    assert command("predict", str(run), str(data), "-o", str(plain)) == 0
    assert [row["note"] for row in read(plain)] == notes
    assert command("predict", str(run), str(data), "-o", str(out), "--escape-formulas") == 0
    formulas = {"=1+1", "+cmd", "-x", "@SUM(A1)", "\tx", "\rx", "+1-1"}
    assert [row["note"] for row in read(out)] == ["'" * (note in formulas) + note for note in notes]
    assert "'=column" in read(out)[0]


@pytest.mark.parametrize("target", ["o.csv", "o.jsonl.gz", "o.parquet"])
def test_outputs_have_the_permissions_that_the_user_wants(predictor: Predictor, tmp_path: Path, target: str) -> None:
    data = write(tmp_path / "d.jsonl", [*ROWS, {"text": ""}])
    before = os.umask(0o027)
    try:
        predictor.predict(Request(DataSource(str(data), bad_rows="skip"), tmp_path / target), print)
    finally:
        os.umask(before)
    for name in (target, f"{target}.bad.jsonl"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


def test_long_texts(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "d.csv", ROWS)
    answers = {}
    for long in ("cut", "head-tail", "windows"):
        out = tmp_path / f"{long}.jsonl"
        assert command("predict", str(run), str(data), "-o", str(out), "--long", long) == 0
        answers[long] = read(out)
        cut = sum(row["cut"] for row in answers[long])
        assert (f"{cut} texts cut" if cut else "no text cut") in capsys.readouterr().err
    fits = [row["id"] for row in answers["cut"] if not row["cut"]]
    for row in answers["cut"]:
        others = [answers[long][int(row["id"])] for long in ("head-tail", "windows")]
        if row["id"] in fits:
            assert all(other["score"] == pytest.approx(row["score"], abs=2e-6) for other in others)
        else:
            assert all(other["score"] != row["score"] for other in others)
    assert not any(row["cut"] for row in answers["windows"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{missing}", "{data}"], 4, "does not exist: give the directory of a run"),
        (["{run}"], 2, "nothing to predict: give a file"),
        (["{run}", "{missing}"], 3, "no such file"),
        (["{run}", "--text", "a", "-o", "{new}"], 2, "a single --text is printed"),
        (["{run}", "--text", "a", "--text-pair", "b"], 2, "trained on single texts"),
        (["{pair_run}", "--text", "a"], 2, "trained on pairs of texts"),
        (["{run}", "{data}", "-o", "{tmp}/o.txt"], 2, "its ending must say the format"),
        (["{run}", "{data}", "-o", "{tmp}/o.parquet.gz"], 2, "its ending must say the format"),
        (["{run}", "{data}", "-o", "{data}"], 2, "exists: give another -o, or replace it with --overwrite"),
        (["{run}", "{data}", "-o", "{tmp}/no/o.csv"], 4, "cannot be written"),
        (["{run}", "{data}", "-o", "{tmp}/folder.csv"], 2, "is a directory"),
        (["{run}", "{data}", "--resume"], 2, "need an output"),
        (["{run}", "{data}", "-o", "{new}", "--resume", "--overwrite"], 2, "give one of them"),
        (["{run}", "{data}", "-o", "{new}", "--top", "4"], 2, "the run has 3 labels"),
        (["{run}", "{data}", "-o", "{new}", "--shard", "3/2"], 2, "--shard 3/2: give i/n"),
        (["{run}", "{data}", "-o", "{new}", "--long", "middle"], 2, "choose one of cut, head-tail, windows, error"),
        (["{run}", "{data}", "-o", "{new}", "--long", "error"], 3, "d.csv, line 4: has more than the model's 16"),
        (["{run}", "{data}", "-o", "{new}", "--budget", "most"], 2, "budget 'most' is not known"),
        (["{run}", "{data}", "-o", "{new}", "--text", "txt"], 3, "did you mean 'text'"),
        (["{run}", "{data}", "-o", "{new}", "--text-pair", "note"], 2, "trained on single texts"),
        (["{run}", "{data}", "-o", "{new}", "--split", "test"], 2, "has no split 'test': it has train"),
        (["{run}", "{data}", "-o", "{new}", "--workers", "0"], 2, "is no folder of data files"),
        (["{run}", "{data}", "-o", "{tmp}/o.jsonl", "--escape-formulas"], 2, "--escape-formulas is for CSV and TSV"),
        (["{run}", "{data}", "-o", "{new}", "--bad-rows", "keep"], 2, "bad_rows is 'keep'"),
        (["{pair_run}", "{data}", "-o", "{new}"], 3, "no column 'premise', which the run was trained on"),
        (["{run}", "{taken}", "-o", "{new}"], 3, "the input has the column 'predicted_label'"),
        (["{run}", "{empty}", "-o", "{new}"], 3, "line 2: 'text' is empty or missing"),
        (["{run}", "{late}", "-o", "{new}"], 3, "line 150: the field 'more' is none of the columns"),
        (["{run}", "{clash}", "-o", "{tmp}/o.jsonl"], 3, "line 150: the field 'label' is one that predict adds"),
        (["{run}", "{mixed}", "-o", "{tmp}/o.parquet"], 3, "do not fit one Parquet schema"),
    ],
)
def test_errors_and_their_codes(
    arguments: list[str],
    code: int,
    message: str,
    run: Path,
    pair_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder.csv").mkdir()
    many = [{"text": "a film"} for _ in range(160)]
    names = {
        "run": run, "pair_run": pair_run, "tmp": tmp_path, "missing": tmp_path / "missing", "new": tmp_path / "new.csv",
        "data": write(tmp_path / "d.csv", [{"text": text, "note": ""} for text in ("a", "b", "a film " * 9)]),
        "taken": write(tmp_path / "taken.jsonl", [{"text": "a", "label": 1, "predicted_label": 2}]),
        "empty": write(tmp_path / "empty.jsonl", [{"text": "a"}, {"text": ""}]),
        "late": write(tmp_path / "late.jsonl", [*many[:149], {"text": "a", "more": 1}]),
        "clash": write(tmp_path / "clash.jsonl", [*many[:149], {"text": "a", "label": 1}]),
        "mixed": write(tmp_path / "mixed.jsonl", [{"text": "a", "x": 1}] * 8 + [{"text": "a", "x": "b"}] * 8),
    }  # fmt: skip
    assert command("predict", *(argument.format(**names) for argument in arguments)) == code
    assert message in capsys.readouterr().err
