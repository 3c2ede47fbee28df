"""Figures against values worked out by hand or known from textbooks."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from budgetformer import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.cost.flops import count
from budgetformer.data.tokens import TokenTable
from budgetformer.engine.scores import Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.evaluate import cost_of, evaluate, is_correct, mcnemar, proportion, row_losses, summarize
from tests.tables import make_table


def encoded(lengths: list[int], labels: Any) -> TokenTable:
    return make_table(np.arange(sum(lengths)) % 50 + 1, lengths, labels)


def scored(
    logits: list[list[float]], table: TokenTable, task: str = "single_label_classification", **parts: Any
) -> Scores:
    zeros = np.zeros((len(logits), 2), np.float32)
    known = {"logits": np.array(logits, np.float32), "budget": zeros, "heads": zeros.astype(np.int16), "entropy": zeros}
    return Scores(table, task, 4, **{**known, **parts})


def engine(model: BudgetFormerForSequenceClassification, batch_tokens: int = 4096) -> TorchEngine:
    made = TorchEngine(model)
    made.batch_tokens = batch_tokens
    return made


def config(**options: Any) -> BudgetFormerConfig:
    return BudgetFormerConfig.preset("tiny", **{"vocab_size": 60, "id2label": {0: "a", 1: "b"}, **options})


# Newcombe 1998, example b
def test_wilson_is_the_textbook_interval() -> None:
    assert proportion(81, 263) == pytest.approx({"value": 81 / 263, "low": 0.2553, "high": 0.3662}, abs=1e-4)
    assert proportion(0, 20) == pytest.approx({"value": 0.0, "low": 0.0, "high": 0.1611}, abs=1e-4)
    assert proportion(0, 0) == {"value": 0.0, "low": 0.0, "high": 1.0}


def test_classification_by_hand() -> None:
    # labels a a a b; predicted a a b b
    out = scored([[1, 0], [2, 0], [0, 1], [0, 3]], encoded([3, 4, 5, 6], np.array([0, 0, 0, 1], np.int32)))
    result = summarize(out, config().spec, split="test", dial="learned", hardest=2)
    assert result.metric == "accuracy"
    assert result.score == 0.75
    assert result.quality["confusion"] == [[2, 1], [0, 1]]
    a, b = result.quality["per_class"]
    assert (a["precision"], a["recall"], a["rows"]) == (1.0, pytest.approx(2 / 3), 3)
    assert (b["precision"], b["recall"]) == (0.5, 1.0)
    assert result.quality["macro_f1"] == pytest.approx((0.8 + 2 / 3) / 2)
    assert [row["row"] for row in result.hardest] == [2, 0]
    assert result.hardest[0]["loss"] == pytest.approx(math.log(1 + math.e))
    assert result.hardest[0]["label"] == "a"
    assert result.hardest[0]["predicted"] == "b"


def test_multi_label_by_hand() -> None:
    made = config(problem_type="multi_label_classification")
    out = scored([[1, -1], [1, 1]], encoded([3, 4], np.array([[1, 0], [1, 0]], np.uint8)), made.task)
    result = summarize(out, made.spec, split="test", dial="learned")
    assert result.quality["exact_match"]["value"] == 0.5
    assert result.score == result.quality["micro_f1"] == pytest.approx(2 * 2 / (3 + 2))
    assert is_correct(out).tolist() == [True, False]  # type: ignore[union-attr]


def test_regression_by_hand() -> None:
    made = config(id2label={0: "x"}, problem_type="regression")
    out = scored([[1.0], [2.0], [4.0]], encoded([3, 4, 5], np.array([1.0, 3.0, 2.0], np.float32)), made.task)
    result = summarize(out, made.spec, split="test", dial="learned")
    assert result.quality["mse"]["value"] == pytest.approx(5 / 3)
    assert result.quality["mae"] == pytest.approx(1.0)
    assert result.quality["r2"] == pytest.approx(1 - (5 / 3) / (2 / 3))
    assert is_correct(out) is None


@pytest.mark.parametrize(
    ("only_ours", "only_theirs", "p"),
    [(5, 5, 1.0), (10, 0, 2 / 2**10), (1, 8, 2 * (1 + 9) / 2**9), (0, 0, 1.0)],
)
def test_mcnemar_is_the_exact_binomial_test(only_ours: int, only_theirs: int, p: float) -> None:
    ours = [True] * only_ours + [False] * only_theirs + [True] * 7
    theirs = [False] * only_ours + [True] * only_theirs + [True] * 7
    result = mcnemar(ours, theirs)
    assert result["p_value"] == pytest.approx(p)
    assert ("not significantly" in result["verdict"]) is (p >= 0.05)
    if only_ours == 10:
        assert result["verdict"].startswith("better than the dense twin by 58.82 points")


def test_mcnemar_does_not_overflow() -> None:
    ours = np.arange(20000) % 2 == 0
    assert 0.99 < mcnemar(ours, ~ours)["p_value"] <= 1.0


def test_cost_counts_executed_heads_at_real_lengths() -> None:
    made = config()
    heads = np.array([[1, 2], [4, 4], [2, 2]], np.int16)
    lengths = np.array([5, 9, 5])
    table = encoded(lengths.tolist(), np.zeros(3, np.int32))
    result = cost_of(scored([[0, 1]] * 3, table, heads=heads, budget=np.full((3, 2), 0.5, np.float32)), made.spec)
    shape = made.spec.shape
    each = [count(shape, int(n), list(k)).total for n, k in zip(lengths, heads, strict=True)]
    assert result["flops_per_text"] == pytest.approx(np.mean(each))
    dense = [count(shape, int(n), [4, 4], "dense").total for n in lengths]
    assert result["flops_per_text_dense"] == pytest.approx(np.mean(dense))
    assert result["flops_ratio"] == pytest.approx(np.sum(each) / np.sum(dense))


def test_rows_come_back_in_their_order() -> None:
    model = BudgetFormerForSequenceClassification(config(training_progress=1.0))
    lengths = [9, 3, 7, 3, 12, 1]
    data = encoded(lengths, np.array([0, 1, 0, 1, 0, 1], np.int32))
    result = score(engine(model, 20), data)
    assert model.training
    model.eval()
    for row in range(6):
        ids = torch.from_numpy(data.tokens[data.offsets[row] : data.offsets[row + 1]].astype(np.int64))[None]
        with torch.inference_mode():
            alone = model(ids)
        np.testing.assert_allclose(result.logits[row], alone.logits[0].numpy(), atol=1e-5)
        assert result.heads[row].tolist() == [int(a.heads) for a in alone.allocations]
        loss = -math.log(float(alone.logits.softmax(-1)[0, row % 2]))
        assert row_losses(result)[row] == pytest.approx(loss, abs=1e-5)


def test_shares_of_the_work_add_up_to_the_whole() -> None:
    model = BudgetFormerForSequenceClassification(config())
    data = encoded([4] * 7 + [9] * 5, np.zeros(12, np.int32))
    complete = score(engine(model, 16), data)
    parts = [score(engine(model, 16), data, share=(i, 3)) for i in range(3)]
    np.testing.assert_array_equal(sum(p.logits for p in parts), complete.logits)
    np.testing.assert_array_equal(sum(p.heads for p in parts), complete.heads)


def test_evaluation_is_json_and_heeds_the_dial() -> None:
    import json

    model = BudgetFormerForSequenceClassification(config())
    data = encoded([4, 5, 6], np.array([0, 1, 0], np.int32))
    results = {dial: evaluate(engine(model), data, split="test", dial=dial) for dial in ("fixed:0.25", "full")}
    assert results["fixed:0.25"].budget["k_over_h"] == 0.25
    assert results["full"].budget["k_over_h"] == 1.0
    assert results["full"].cost["flops_ratio"] > 1  # all heads and the gates
    assert json.loads(json.dumps(asdict(results["full"])))["dial"] == "full"
