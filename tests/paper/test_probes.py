from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from budgetformer.data.tokens import TokenTable
from budgetformer.engine.scores import score
from budgetformer.engine.torch import TorchEngine
from budgetformer.models.model import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer_reproduction.probes import best_static, fixed_weights, hooked, probe, some_rows
from budgetformer_reproduction.tables import probe_gap
from tests.tables import make_table

NOTHING = fixed_weights(torch.zeros(4))


def make_model(**options: object) -> BudgetFormerForSequenceClassification:
    config = BudgetFormerConfig.preset(
        "tiny", vocab_size=50, hidden_size=16, intermediate_size=16, initializer_range=0.5, **options
    )
    model = BudgetFormerForSequenceClassification(config)
    model.train(False)
    return model


def make_rows(rows: int = 30) -> TokenTable:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, rows)
    tokens = rng.integers(5, 50, lengths.sum(), dtype=np.int32)
    return make_table(tokens, lengths.tolist(), rng.integers(0, 2, rows, dtype=np.int32))


def test_fixed_weights_are_the_same_for_every_input() -> None:
    model = make_model()
    with hooked(model, {1: fixed_weights(torch.tensor([0.0, 2.0, 0.0, 1.0]))}), torch.inference_mode():
        allocation = model(torch.randint(5, 50, (3, 5))).allocations[1]
    assert allocation.active.tolist() == [[False, True, False, True]] * 3
    assert allocation.heads.tolist() == [2, 2, 2]
    assert allocation.budget.tolist() == [0.5, 0.5, 0.5]
    assert allocation.weights is not None
    assert allocation.weights.tolist() == [[0, 2, 0, 1]] * 3
    assert torch.allclose(allocation.relevance.sum(-1), torch.ones(3))


def test_every_head_at_weight_one_is_the_dense_model() -> None:
    model, rows = make_model(gates={"kind": "all"}), make_rows()
    before = score(TorchEngine(model), rows)
    with hooked(model, dict.fromkeys((0, 1), fixed_weights(torch.ones(4)))):
        np.testing.assert_allclose(score(TorchEngine(model), rows).logits, before.logits, atol=1e-5)


def test_a_removed_layer_leaves_its_bias() -> None:
    model = make_model()
    attention = model.attentions[0]
    torch.nn.init.normal_(attention.out.bias)
    x = torch.randn(2, 5, 16)
    with hooked(model, {0: NOTHING}), torch.inference_mode():
        y, allocation = attention(x, None, 1.0)
    assert torch.allclose(y, attention.out.bias.expand_as(y))
    assert allocation.heads.tolist() == [0, 0]


def test_a_probed_model_is_left_as_it_was() -> None:
    model, rows = make_model(), make_rows()
    before = score(TorchEngine(model), rows)
    with hooked(model, {0: NOTHING}):
        assert score(TorchEngine(model), rows).logits.tolist() != before.logits.tolist()
    with pytest.raises(RuntimeError, match="on purpose"), hooked(model, {0: NOTHING}):
        raise RuntimeError("on purpose")
    np.testing.assert_array_equal(score(TorchEngine(model), rows).logits, before.logits)


def test_the_best_static_heads_are_those_with_most_weight() -> None:
    model, rows = make_model(), make_rows()
    for attention in model.attentions:
        scorer = attention.allocator.scorer
        torch.nn.init.zeros_(scorer.weight)
        scorer.bias.data = torch.tensor([0.0, 3.0, 1.0, 2.0])
        budget = attention.allocator.budget_net[2]
        torch.nn.init.zeros_(budget.weight)  # s = 0.5, so k = 2, for every input
    static = best_static(model, rows)
    for layer, attention in enumerate(model.attentions):
        allocation = attention.allocator(torch.randn(1, 3, 16), None, 0.0)
        assert allocation.weights is not None
        assert torch.allclose(static[layer], allocation.weights[0])
        assert (static[layer] > 0).tolist() == [False, True, False, True]


def test_rows_are_drawn_once_and_kept_whole() -> None:
    encoded = make_rows()
    rows = some_rows(encoded, 7)
    assert len(rows) == 7
    assert rows.tolist() == some_rows(encoded, 7).tolist() == sorted(rows)
    assert some_rows(encoded, None).tolist() == list(range(30))
    sample = encoded.select(rows)
    for place, row in enumerate(rows):
        tokens = sample.tokens[sample.offsets[place] : sample.offsets[place + 1]]
        assert tokens.tolist() == encoded.tokens[encoded.offsets[row] : encoded.offsets[row + 1]].tolist()
    assert sample.lines.tolist() == (rows + 1).tolist()


def test_probes_of_both_models() -> None:
    rows = make_rows()
    for model in (make_model(), make_model(gates={"kind": "all"})):
        outcome = score(TorchEngine(model), rows)
        probes = probe(model, rows, rows, outcome, 20)
        assert probes["rows"] == 20
        assert set(probes["removed"]) == {"1", "2"}
        assert probes["removed_all"]["k_over_h"] == 0
        for other in (probes["removed_all"], probes["removed"]["1"]):
            change = (other["gained"] - other["lost"]) / 20
            assert other["accuracy"] == pytest.approx(probes["learned"]["accuracy"] + change)
        assert ("override" in probes) == (model.config.kind == "learned")
    assert probe(make_model(), rows, rows, outcome, None)["override"]["1"]["k_over_h"] == 1


def test_a_probe_is_compared_on_the_same_rows() -> None:
    def cell(as_is: float, **other: float) -> Any:
        return SimpleNamespace(probes={"rows": 100, "learned": {"accuracy": as_is}, "random": other})

    paired = [cell(0.80, accuracy=0.74, lost=10, gained=4), cell(0.82, accuracy=0.80, lost=2, gained=0)]
    gap = probe_gap(paired, "random")
    # 1.96 times the root of (14 - 100 * 0.06 ** 2) / 99 / 100, and of (2 - 100 * 0.02 ** 2) / 99 / 100, averaged
    assert gap == pytest.approx((0.04, 0.04 - 0.05016, 0.04 + 0.05016), abs=2e-5)
    gap = probe_gap([cell(0.80, accuracy=0.74)], "random")  # of two samples: as cells of earlier versions have it
    assert gap == pytest.approx((0.06, 0.06 - 0.11635, 0.06 + 0.11635), abs=2e-5)
    assert probe_gap([], "random") is None
