"""Damaged, forbidden and foreign run directories: an error that names the file, never a traceback or another answer."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.processes import command
from tests.test_readme import ROOT

from budgetformer import BudgetFormerClassifier
from budgetformer.errors import ModelError
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.files import hash_files, write_directory
from budgetformer.runs.run import Run


@pytest.fixture
def copy(tiny_run: Path, tmp_path: Path) -> Path:
    """A finished run that may be damaged."""
    shutil.copytree(tiny_run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    return tmp_path / "run"


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def accept(folder: Path) -> None:
    """Record the hashes of the files as they are now: a stranger's directory is consistent."""
    change(folder / "run.json", sha256=hash_files(folder))


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "training_rows.safetensors"])
def test_one_flipped_bit_is_noticed(name: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copy / name, -2)
    assert command("predict", copy, "--text", "a superb story") == 4
    assert f"{copy / name} was damaged or changed after it was written (its SHA-256 is " in capsys.readouterr().err


def test_the_weights_are_verified_for_transformers_too(copy: Path) -> None:
    flip(copy / "model.safetensors", -2)
    with pytest.raises(ModelError, match=r"model\.safetensors was damaged or changed"):
        BudgetFormerForSequenceClassification.from_pretrained(copy)


def test_a_damaged_dense_twin_is_not_passed_over(copy: Path, reviews: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "baseline" / "config.json").unlink()
    assert command("eval", copy, reviews) == 4
    assert "baseline is not finished (status: done)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**7),
        ("hidden_size", 10**9),
        ("vocab_size", 10**12),
        ("max_position_embeddings", 10**9),
        ("num_labels", 10**9),
        ("intermediate_size", "huge"),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused_before_anything_is_built(
    key: str, value: Any, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(copy / "config.json", **{key: value})
    accept(copy)
    assert command("predict", copy, "--text", "a superb story") == 4
    assert f"config.json has {key} {value!r}, and the weights beside it have room for" in capsys.readouterr().err


def test_absurd_sizes_of_a_base_are_refused_too(base: Path, reviews: Path, tmp_path: Path) -> None:
    strange = tmp_path / "base"
    shutil.copytree(base, strange)
    change(strange / "config.json", num_hidden_layers=10**7)
    assert command("train", reviews, "--base", strange, "-o", tmp_path / "run") == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "run.json has labels None (Input should be a valid list)"),
        ({"max_length": -1}, "run.json has max_length -1 (Input should be greater than or equal to 1)"),
        ({"max_length": 1000}, "max_length is 1000 in the record and 128 in config.json"),
        ({"task": "poetry"}, "run.json has task 'poetry'"),
        ({"labels": ["pos", "neg"]}, "labels is ['pos', 'neg'] in the record and ['neg', 'pos'] in config.json"),
        ({"data": {"data": 5}}, "run.json cannot be read"),
    ],
)
def test_a_record_that_says_something_else_is_refused(
    changes: dict[str, Any], message: str, copy: Path, reviews: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(copy / "run.json", **changes)
    assert command("eval", copy, reviews) == 4
    assert message in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["strange"] = 10**9
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    accept(copy)
    assert command("predict", copy, "--text", "a superb story") == 4
    assert "tokenizer.json has the id 1000000000, and the model 200 pieces" in capsys.readouterr().err


def test_an_estimator_for_other_classes_is_refused(copy: Path) -> None:
    about = {"classes": ["a", "b"], "dtype": "<U3", "parameters": {}}
    change(copy / "run.json", estimator=about)
    with pytest.raises(ModelError, match=r"the classes \['a', 'b'\] are not the model's"):
        BudgetFormerClassifier.load(copy)
    change(copy / "run.json", estimator={**about, "dtype": "poetry"})
    with pytest.raises(ModelError, match=r"run\.json cannot be read \(.*poetry"):
        BudgetFormerClassifier.load(copy)


@pytest.mark.parametrize("content", ["{}", "null", '{"files": 5}', "{"])
def test_an_export_with_a_damaged_record_is_not_replaced(
    content: str, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "export.json").write_text(content)
    assert command("export", tiny_run, "-o", tmp_path / "export") == 4
    assert "give another directory with -o" in capsys.readouterr().err
    assert (tmp_path / "export" / "export.json").read_text() == content


@contextmanager
def another_user() -> Iterator[None]:
    """What follows runs with nobody's rights."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["run.json", "config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_is_not_called_corrupt(
    name: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        run = shutil.copytree(copy, Path(folder, "run"))
        assert command("predict", run, "--text", "a superb story") == 0
        (run / name).chmod(0)
        for recorded in (True, False):
            if not recorded and name != "run.json":
                change(run / "run.json", sha256={})
            with another_user():
                assert command("predict", run, "--text", "a superb story") == 4
            message = capsys.readouterr().err.lower()
            assert f"{run / name}".lower() in message
            assert "permission denied" in message
            assert "corrupt" not in message
        (run / name).chmod(0o644)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.is_file()}


def test_files_have_the_mode_that_the_umask_asks_for(
    train_tiny: Callable[..., Path], reviews: Path, tmp_path: Path
) -> None:
    with umask(0o027):
        run = train_tiny(reviews, "--epochs", "1")
        assert command("export", run, "-o", tmp_path / "export") == 0
        write_directory(tmp_path / "words", lambda folder: save_file({"w": np.zeros(3)}, folder / "words.safetensors"))
    written = {**modes(run), **modes(tmp_path)}
    assert len(written) > 15
    assert {name for name, mode in written.items() if mode != 0o640} == set()


def test_what_training_rows_were_is_still_known(copy: Path) -> None:
    assert load_file(copy / "training_rows.safetensors")["hashes"].dtype == np.uint64
    assert Run.open(copy).record["sha256"] == hash_files(copy)


def fuzz_runs() -> Any:
    """benchmarks/fuzz_runs.py, which does the same at length."""
    spec = importlib.util.spec_from_file_location("fuzz_runs", ROOT / "benchmarks" / "fuzz_runs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_damage_ends_in_a_traceback_or_in_another_answer(copy: Path, tiny_base: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    fuzz = fuzz_runs()
    folders = {"run": copy, "delta": tmp_path / "delta", "export": tmp_path / "export", "estimator": tmp_path / "saved"}
    shutil.copytree(tiny_base, folders["delta"], ignore=shutil.ignore_patterns("checkpoints"))
    assert command("export", copy, "-o", folders["export"]) == 0
    BudgetFormerClassifier.load(copy).save(folders["estimator"])
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "a superb story,pos\na dull story,neg\n" * 10)
    counts, wrong = fuzz.fuzz(folders, rows, cases=150, seed=0)
    assert wrong == []
    assert counts["exit 4"] > 50
