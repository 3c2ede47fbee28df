"""The bench's rows, and its verb. Speed itself is never asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from budgetformer import bench
from budgetformer.bench import dense_rivals, memory_row, random_heads, speed_rows
from budgetformer.cost.flops import Shape, count
from tests.cli.test_train import command

TINY = Shape(width=32, heads=4, layers=2, inner=64, vocab=100)


def test_every_sample_gets_its_own_k_heads() -> None:
    active = random_heads(200, 8, 3)
    assert (active.sum(1) == 3).all()
    assert len({tuple(row) for row in active.tolist()}) > 20


def test_rows_say_what_was_compared() -> None:
    rows = [*speed_rows("attention", TINY, [2], [5], [1, 4]), *speed_rows("model", TINY, [2], [5], [1])]
    assert [tuple(row[key] for key in ("what", "batch", "length", "heads", "k")) for row in rows] == [
        ("attention", 2, 5, 4, 1),
        ("attention", 2, 5, 4, 4),
        ("model", 2, 5, 4, 1),
    ]
    assert [row["ideal"] for row in rows[:2]] == [4.0, 1.0]
    model = rows[2]
    assert set(model["rivals_ms"]) == {"ours", "torch", "bert"}
    assert model["dense_ms"] == min(model["rivals_ms"].values())
    assert model["speedup"] == pytest.approx(model["dense_ms"] / model["selective_ms"])
    shape = replace(TINY, scorer=False)
    assert model["ideal"] == count(shape, 5, [], "dense").total / count(shape, 5, [1, 1]).total
    assert {row["engine"] for row in rows} == {"torch"}


def test_graphs_are_compared_with_the_dense_graph() -> None:
    pytest.importorskip("onnxruntime")
    sizes = {"attention": [1], "model": [4]}
    rows = [row for what, ks in sizes.items() for row in speed_rows(what, TINY, [2], [5], ks, "onnx")]
    assert [(row["what"], row["k"], row["engine"]) for row in rows] == [("attention", 1, "onnx"), ("model", 4, "onnx")]
    assert rows[0]["ideal"] == 4.0
    assert set(rows[0]["rivals_ms"]) == {"dense"}
    assert rows[0]["speedup"] == pytest.approx(rows[0]["dense_ms"] / rows[0]["selective_ms"])


def test_rivals_have_one_shape() -> None:
    sizes = {
        name: sum(p.numel() for p in (m.base if name == "ours" else m).encoder.parameters())
        for name, m in dense_rivals(TINY).items()
        if name != "bert"
    }
    layer = 4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 4 * 32
    assert sizes == {"ours": 2 * layer + 100 * 32, "torch": 2 * layer}
    ids = torch.ones(2, 5, dtype=torch.long)
    for model in dense_rivals(TINY).values():
        out = model(ids)
        assert getattr(out, "logits", out).shape == (2, 4)


def test_units_are_priced_by_the_time_that_half_of_them_save(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: dict[str, list[int]] = {}

    def times(calls: dict[str, Any], **_: Any) -> dict[str, float]:
        for name, call in calls.items():
            y, _ = call()
            assert y.shape == (2, 5, 32)
            shapes[name] = [len(module.weight) for module in call.func.children() if isinstance(module, nn.Linear)]
        return {"head 4": 10.0, "head 2": 7.0, "group 2": 9.0, "group 1": 4.0}

    monkeypatch.setattr(bench, "take_turns", times)
    (row,) = bench.unit_rows(replace(TINY, inner=128), [2], [5])
    assert shapes == {"head 4": [96, 32], "head 2": [48, 32], "group 2": [128, 32], "group 1": [64, 32]}
    assert (row["head_ms"], row["group_ms"], row["groups_price"]) == (1.5, 5.0, 5 / 8)
    assert row["flops_price"] == 128 / (128 + 64 + 5)


def test_memory_is_measured_in_its_own_process() -> None:
    wide = Shape(width=64, heads=4, layers=1, inner=64, vocab=100)
    rows = [memory_row(wide, 32, 256, 0) for _ in range(3)]  # the kernel may disturb one of them
    row = {part: median(row[part] for row in rows) for part in ("block_mib", "model_mib")}
    vectors = 32 * 256 * 64 * 4 / 2**20  # MiB: one for every token
    # q, k and v; the result may lie in memory that was resident before
    assert all(3 * vectors <= row[part] < 40 * vectors for part in ("block_mib", "model_mib"))


def test_the_verb_prints_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ["--shape", "32x4x1", "--batch", "1", "--length", "8", "-k", "1"]
    assert command("bench", *shape, "--what", "attention", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in result["rows"]] == ["attention"]
    assert result["environment"]["threads"] >= 1
    assert command("bench", *shape, "--what", "attention") == 0
    assert "1/4" in capsys.readouterr().out
    for half, code in ((1.0, 0), (2.0, 4)):
        times = {"head 4": 2.0, "head 2": half, "group 2": 2.0, "group 1": half}
        monkeypatch.setattr(bench, "take_turns", lambda *_, times=times, **__: times)
        assert command("bench", *shape, "--what", "units") == code
    output = capsys.readouterr()
    assert "groups_price" in output.out
    assert "1 x 8 tokens: half of the units took as long as all; time a larger batch" in output.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--shape", "30x4x1"], 2, "hidden_size=30 is not divisible"),
        (["--shape", "768x8"], 2, "--shape '768x8': give WIDTHxHEADSxLAYERS"),
        (["--length", "9000"], 2, "less than or equal to 8192"),
        (["-k", "9"], 2, "-k 9: give numbers from 1 to 8"),
        (["--what", "everything"], 2, "give attention, model, memory, all, units or onnx"),
        (["--what", "units", "--shape", "64x1x1"], 2, "give a shape of two heads or more"),
        (["nowhere"], 4, "nowhere does not exist"),
    ],
)
def test_wrong_benches(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("bench", *arguments) == code
    assert message in capsys.readouterr().err
