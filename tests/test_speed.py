"""Engines beside each other: what is compared, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from budgetformer import speed
from budgetformer.runs.run import Run
from tests.processes import command


def test_every_engine_answers_the_same_texts(tiny_staged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, alone = speed.in_fresh_process, []

    def measured(program: list[str], arguments: list[Any]) -> dict[str, Any]:
        """The first engine in a new process, the others here: a new process does nothing but import and call."""
        if not alone:
            alone.append(arguments)
            return fresh(program, arguments)
        what, *options = json.loads(json.dumps(arguments))
        return dict(json.loads(json.dumps({"measure": speed.measure, "splitting": speed.splitting}[what](*options))))

    monkeypatch.setattr(speed, "in_fresh_process", measured)
    monkeypatch.setattr(speed, "_ROUNDS", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = speed.compare_engines(Run.open(tiny_staged), texts=12, seconds=0)
    by_name = {engine["engine"]: engine for engine in result["engines"]}
    assert list(by_name) == ["torch dense", "torch staged", "ONNX dense fp32", "ONNX dense int8", "ONNX staged fp32",
                             "ONNX staged int8"]  # fmt: skip
    assert by_name["torch dense"]["score"] == by_name["ONNX dense fp32"]["score"]
    assert by_name["torch staged"]["score"] == by_name["ONNX staged fp32"]["score"]
    assert by_name["torch staged"]["flops_ratio"] == pytest.approx(by_name["ONNX staged fp32"]["flops_ratio"])
    assert by_name["ONNX staged fp32"]["flops_ratio"] < by_name["ONNX dense fp32"]["flops_ratio"] == 1
    assert result["splitting"].keys() == {"1", "8", "32"}
    assert all(0.2 < ratio < 20 for ratio in result["splitting"].values())
    assert [by_name[name]["other_labels"] for name in ("torch dense", "torch staged", "ONNX staged fp32")] == [0, 0, 0]
    assert all(rate > 0 for engine in result["engines"] for rate in engine["rows_per_second"].values())


def test_what_cannot_be_compared_is_refused(
    tiny_multi: Path, tiny_staged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("bench", "--what", "engines") == 2
    assert "--what engines and --dense are for a RUN: give its directory" in capsys.readouterr().err
    assert command("bench", tiny_multi, "--what", "engines") == 2
    assert "is not dense: train RUN with --with-baseline, or give a run with --dense" in capsys.readouterr().err
    assert command("export", tiny_staged, "-o", tmp_path / "out") == 0
    assert command("bench", tmp_path / "out", "--what", "engines") == 2
    assert "is an export: give the run itself" in capsys.readouterr().err
    assert command("bench", tiny_staged, "more.csv") == 2
    assert "more.csv: texts are for --what engines" in capsys.readouterr().err
