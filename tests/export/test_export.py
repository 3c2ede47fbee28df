"""`budgetformer export` as a user types it, the engine that runs what it wrote, and every wrong way."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.cli.test_train import command
from tests.export.test_network import make_model
from tests.tables import make_table

from budgetformer.data.batches import Batch
from budgetformer.data.tokenizer import load_tokenizer
from budgetformer.dial import Dial
from budgetformer.engine.graphs import GraphEngine
from budgetformer.engine.scores import Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import ModelError, UsageError
from budgetformer.export import run as export_module
from budgetformer.export.cut import all_nodes
from budgetformer.export.network import build
from budgetformer.export.verify import CheckRows, check_equal
from budgetformer.runs.files import hash_files
from budgetformer.runs.run import Run

TEXT_FILES = {"tokenizer.json", "tokenizer_config.json"}
TEXTS = ["a superb story of town", "the dull film of people with music and light", "lovely", "poor poor town"]


@pytest.fixture(scope="module")
def run(tiny_run: Path) -> Path:
    return tiny_run


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "plain"
    assert command("export", str(run), "-o", str(folder)) == 0
    return folder


def scores_of(folder: Path, texts: list[str], budget: str | None = None) -> Scores:
    run = Run.open(folder)
    return run.scorer(budget).score(texts)


def batch_of(ids: Any, mask: Any) -> Batch:
    return Batch(np.array(ids), np.array(mask, bool), None, None, np.arange(len(ids)))


def onnx_engine(folder: Path) -> GraphEngine:
    engine = Run.open(folder).engine()
    assert isinstance(engine, GraphEngine)
    return engine


def test_the_directory_is_all_that_it_takes(run: Path, exported: Path) -> None:
    opened = Run.open(exported)
    assert (opened.labels, opened.task, opened.max_length) == (["neg", "pos"], "single_label_classification", 32)
    model, tokenizer = Run.open(run).model, load_tokenizer(run, offline=True)
    want = model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.detach().numpy()
    scores = scores_of(exported, TEXTS)
    np.testing.assert_allclose(scores.logits, want, atol=1e-5)
    assert scores.heads.shape == (4, model.config.num_hidden_layers)
    assert (scores_of(exported, TEXTS, "max:0.25").heads == 1).all()


def test_the_record_says_what_was_checked(run: Path, exported: Path, reviews: Path) -> None:
    record = json.loads((exported / "export.json").read_text())
    checked = record["verification"]
    assert checked["source"] == f"20 test rows of {reviews}"
    assert checked["largest_difference"] < 1e-4
    assert (checked["rows"], checked["undecided_rows"], record["int8"]) == (20, 0, None)
    assert (record["format"], record["opset"], record["dial"], record["precision"]) == ("onnx", 20, "learned", "fp32")
    assert set(record["sha256"]) == {"layers-2.onnx", "training_rows.safetensors", *TEXT_FILES}
    assert record["environment"]["onnxruntime"]
    assert record["graphs"] == [{"file": "layers-2.onnx", "depth": 2, "heads": None}]
    assert record["files"] == sorted(path.name for path in exported.iterdir())


def test_it_prints_what_it_did_and_may_replace_an_export(
    run: Path, tmp_path: Path, reviews: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    assert command("export", str(run), "-o", str(target), "--rows", str(reviews)) == 0
    captured = capsys.readouterr()
    assert f"checked on 200 test rows of {reviews}: labels equal, logits within" in captured.out
    assert "comparing with the model on 200" in captured.err
    assert captured.out.splitlines()[-1] == f"next: budgetformer predict {target} new.csv -o answers.csv"
    assert command("export", str(run), "-o", str(target), "--budget", "max:0.5", "--json") == 0
    assert json.loads(capsys.readouterr().out)["dial"] == "max:0.5"
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_int8_reports_what_it_costs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "int8"
    assert command("export", str(run), "-o", str(target), "--int8") == 0
    out = capsys.readouterr().out
    assert "labels changed" in out
    assert "int8 (" in out
    assert "accuracy " in out
    record = json.loads((target / "export.json").read_text())
    assert record["precision"] == "int8 dynamic"
    assert record["int8"]["score_before"] >= record["int8"]["score"] - 0.2
    assert record["bytes"] == (target / "layers-2.onnx").stat().st_size < record["int8"]["bytes_full_precision"]
    made = all_nodes(onnx.load(target / "layers-2.onnx").graph)
    gates = {node.op_type for node in made if "/gate/" in node.name}
    assert "MatMul" in gates
    assert "DynamicQuantizeMatMul" not in gates
    assert sum(node.op_type == "DynamicQuantizeMatMul" for node in made) == 2 * (2 + 2 + 2 * 4)
    assert np.isfinite(scores_of(target, TEXTS).logits).all()


def test_int8_that_the_processor_cannot_run_is_said_plainly(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert command("export", str(run), "-o", str(tmp_path / "out"), "--int8") == 4
    assert "the int8 graphs do not run on this machine (SIGILL): export without --int8" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_graph_that_disagrees_is_not_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: Any, dial: Dial, **options: Any) -> Any:
        model.base.classifier.bias.data[0] += 0.001
        graph = build(model, dial, **options)
        model.base.classifier.bias.data[0] -= 0.001
        return graph

    monkeypatch.setattr(export_module, "build", wrong)
    assert command("export", str(run), "-o", str(tmp_path / "out")) == 4
    assert "the graph does not agree with the model on 20 of 20 test rows" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_rows_without_labels_will_do(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "plain.csv"
    rows.write_text("review\n" + "\n".join(TEXTS) + "\n")
    assert command("export", str(run), "-o", str(tmp_path / "out"), "--rows", str(rows), "--int8") == 0
    captured = capsys.readouterr()
    assert "plain.csv is read without labels" in captured.err
    assert f"checked on 4 rows of {rows}" in captured.out
    assert "accuracy" not in captured.out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data": {"data": "gone.csv"}, "data_path": None}, "gone.csv: no such file"),
        ({"data": {"data": "-"}, "data_path": None}, "they came from standard input"),
        ({"data_digests": {"train": "another"}}, "reviews.csv has changed since"),
    ],
)
def test_without_the_runs_data_rows_are_made_up(
    change: dict[str, Any], reason: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run, moved, ignore=shutil.ignore_patterns("checkpoints"))
    record = json.loads((moved / "run.json").read_text())
    data = {**record["data"], **change.get("data", {})}
    record = {**record, "data_path": None, **change, "data": data}
    (moved / "run.json").write_text(json.dumps(record))
    assert command("export", str(moved), "-o", str(tmp_path / "out")) == 0
    captured = capsys.readouterr()
    assert "the run's own rows cannot be had" in captured.err
    assert reason in captured.err
    assert "checked on 256 made-up rows of random tokens" in captured.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["RUN", "--format", "gguf"], 2, "--format 'gguf': give onnx, openvino or torch"),
        (["RUN", "--budget", "lots"], 2, "budget 'lots' is not known"),
        (["RUN", "--budget", "random"], 2, "budget 'random' cannot be exported"),
        (["RUN", "--rows", "nowhere.csv"], 3, "nowhere.csv: no such file"),
        (["nowhere"], 4, "nowhere does not exist"),
    ],
)
def test_wrong_exports(
    arguments: list[str], code: int, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(run) if argument == "RUN" else argument for argument in arguments]
    assert command("export", *arguments, "-o", str(tmp_path / "out")) == code
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_of_others_is_overwritten(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    assert command("export", str(run), "-o", str(tmp_path / "file")) == 2
    assert "is a file: give a directory" in capsys.readouterr().err
    assert command("export", str(run), "-o", str(tmp_path / "folder")) == 2
    assert "is not empty and holds no export" in capsys.readouterr().err
    assert command("export", str(run), "-o", str(tmp_path / "file" / "below")) == 4
    assert "cannot be written" in capsys.readouterr().err
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "mine"


def test_only_what_an_export_wrote_is_replaced(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert command("export", str(run), "-o", str(out)) == 0
    assert command("export", str(run), "-o", str(out)) == 0
    (out / "thesis.txt").write_text("mine")
    assert command("export", str(run), "-o", str(out)) == 2
    assert "holds 'thesis.txt' too, which no export wrote" in capsys.readouterr().err
    (out / "export.json").write_text("{}")
    assert command("export", str(run), "-o", str(out)) == 4
    assert (out / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_extra_is_named(
    package: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith("budgetformer.export")]:
        monkeypatch.delitem(sys.modules, name)
    assert command("export", str(run), "-o", str(tmp_path / "out")) == 5
    assert f"{package!r}, which is not installed: install budgetformer with its extra 'onnx'" in capsys.readouterr().err


def test_damaged_exports_are_named(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"run\.json does not exist: give the directory of a run or an export"):
        Run.open(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    (copy / "layers-2.onnx").write_bytes((exported / "layers-2.onnx").read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"layers-2\.onnx was damaged or changed after it was written"):
        Run.open(copy)
    record = json.loads((copy / "export.json").read_text())
    (copy / "export.json").write_text(json.dumps({**record, "sha256": hash_files(copy)}))
    with pytest.raises(ModelError, match=r"layers-2\.onnx cannot be loaded by ONNX Runtime"):
        Run.open(copy).engine()
    (copy / "export.json").write_text(json.dumps({key: value for key, value in record.items() if key != "labels"}))
    with pytest.raises(ModelError, match=r"export\.json has no key 'labels'"):
        Run.open(copy)
    (copy / "export.json").write_text("{")
    with pytest.raises(ModelError, match=r"export\.json cannot be read"):
        Run.open(copy)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([1, 2], [1, 1], "give \\(batch, tokens\\)"),
        ([[1, 2]], [[1]], "give \\(batch, tokens\\)"),
        ([[1] * 129], [[1] * 129], "129 tokens but the model 128 positions"),
        ([[1, -1]], [[1, 1]], "holds -1 to 1, but the vocabulary"),
        ([[1, 2], [1, 2]], [[1, 1], [0, 0]], "sample 1 has no real token"),
    ],
)
def test_wrong_input_is_refused(ids: Any, mask: Any, message: str, exported: Path) -> None:
    with pytest.raises(UsageError, match=message):
        onnx_engine(exported).logits(batch_of(ids, mask), Dial())


def test_a_row_that_the_last_bit_decides_is_let_pass_but_not_many() -> None:
    ids = np.concatenate([np.random.default_rng(row).integers(0, 30, 6) for row in range(300)])
    rows = CheckRows(make_table(ids, [6] * 300), "300 rows")
    decided, torn = make_model(), make_model(kind="fixed")
    for attention in torn.attentions:
        attention.allocator.fixed_budget = 0.5 + 1e-6  # type: ignore[assignment]
    for model, passes in ((decided, False), (torn, True)):
        theirs = score(TorchEngine(model), rows.table, Dial())
        assert check_equal(model, Dial(), rows, theirs, theirs)["undecided_rows"] == 0
        ours = replace(theirs, heads=theirs.heads.copy())
        ours.heads[7] += 1
        if passes:
            assert check_equal(model, Dial(), rows, theirs, ours)["undecided_rows"] == 1
            ours.heads[:10] += 1
        with pytest.raises(ModelError, match=r"does not agree with the model on \d+ of 300 rows, first on row \d+"):
            check_equal(model, Dial(), rows, theirs, ours)


def scored(folder: Path, reviews: Path, output: Path, *more: str) -> list[dict[str, str]]:
    assert command("predict", str(folder), str(reviews), "-o", str(output), "--probabilities", *more) == 0
    with output.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("budget", [[], ["--budget", "max:0.25"]])
def test_predict_scores_with_the_graph_as_with_the_run(
    budget: list[str], run: Path, exported: Path, reviews: Path, tmp_path: Path
) -> None:
    ours = scored(exported, reviews, tmp_path / "onnx.csv", *budget)
    theirs = scored(run, reviews, tmp_path / "torch.csv", *budget)
    assert len(ours) == len(theirs) > 20
    for one, other in zip(ours, theirs, strict=True):
        same = ("review", "label", "heads", "cut")
        assert [one[name] for name in same] == [other[name] for name in same]
        assert float(one["score"]) == pytest.approx(float(other["score"]), abs=1e-4)


def test_predict_with_a_graph_resumes_and_refuses_another_one(exported: Path, reviews: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    scored(exported, reviews, output)
    assert command("predict", str(exported), str(reviews), "-o", str(output), "--resume") == 0
    assert command("predict", str(exported), str(reviews), "-o", str(output)) == 2


def test_predict_says_what_a_graph_cannot_do(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ("--text", "a superb story")
    assert command("predict", str(exported), *one) == 0
    assert capsys.readouterr().out.startswith("label")
    assert command("predict", str(exported), *one, "--budget", "fixed:0.5") == 2
    assert "was exported with the budget learned, not fixed:0.5: leave --budget out, give max:X" in said(capsys)
    fixed = tmp_path / "fixed"
    assert command("export", str(run), "-o", str(fixed), "--budget", "fixed:0.5") == 0
    assert command("predict", str(fixed), *one, "--budget", "max:0.5") == 2
    assert "leave --budget out, or export it again" in said(capsys)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What went to stderr, in one line."""
    return " ".join(capsys.readouterr().err.split())


def test_onnx_runtime_tells_its_makers_nothing(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [sys.executable, "-c", "from budgetformer.engine.onnx import runtime; runtime().SessionOptions()"]
    subprocess.run(words, env=environment, check=True)
    assert list(tmp_path.rglob("deviceid")) == []  # what it would make up to know the machine again
