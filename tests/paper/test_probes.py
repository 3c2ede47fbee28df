from __future__ import annotations

import numpy as np
import pytest
import torch

from budgetformer.data import TokenTable
from budgetformer.engine.scores import score
from budgetformer.engine.torch import TorchEngine
from budgetformer.models.model import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.paper.probes import GivenHeads, best_static, given, probe, some_rows
from tests.tables import make_table


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


def test_given_heads_are_the_same_for_every_input() -> None:
    allocation = GivenHeads(torch.tensor([0.0, 2.0, 0.0, 1.0]))(torch.randn(3, 5, 16), None, 1.0)
    assert allocation.active.tolist() == [[False, True, False, True]] * 3
    assert allocation.heads.tolist() == [2, 2, 2]
    assert allocation.budget.tolist() == [0.5, 0.5, 0.5]
    assert allocation.weights is not None
    assert allocation.weights.tolist() == [[0, 2, 0, 1]] * 3
    assert torch.allclose(allocation.relevance.sum(-1), torch.ones(3))


def test_every_head_at_weight_one_is_the_dense_model() -> None:
    model, rows = make_model(allocator="all"), make_rows()
    before = score(TorchEngine(model), rows)
    with given(model, {0: torch.ones(4), 1: torch.ones(4)}):
        np.testing.assert_allclose(score(TorchEngine(model), rows).logits, before.logits, atol=1e-5)


def test_a_removed_layer_leaves_its_bias() -> None:
    model = make_model()
    attention = model.encoder.blocks[0].attention
    torch.nn.init.normal_(attention.out.bias)
    x = torch.randn(2, 5, 16)
    with given(model, {0: torch.zeros(4)}), torch.inference_mode():
        y, allocation = attention(x, None, 1.0)
    assert torch.allclose(y, attention.out.bias.expand_as(y))
    assert allocation.heads.tolist() == [0, 0]


def test_the_models_own_allocators_come_back() -> None:
    model, rows = make_model(), make_rows()
    before, own = score(TorchEngine(model), rows), [block.attention.allocator for block in model.encoder.blocks]
    with given(model, {0: torch.zeros(4)}):
        assert score(TorchEngine(model), rows).logits.tolist() != before.logits.tolist()
    with pytest.raises(RuntimeError, match="on purpose"), given(model, {0: torch.zeros(4)}):
        raise RuntimeError("on purpose")
    assert [block.attention.allocator for block in model.encoder.blocks] == own
    np.testing.assert_array_equal(score(TorchEngine(model), rows).logits, before.logits)


def test_the_best_static_heads_are_those_with_most_weight() -> None:
    model, rows = make_model(), make_rows()
    for block in model.encoder.blocks:
        scorer = block.attention.allocator.scorer
        torch.nn.init.zeros_(scorer.weight)
        scorer.bias.data = torch.tensor([0.0, 3.0, 1.0, 2.0])
        budget = block.attention.allocator.budget_net[2]
        torch.nn.init.zeros_(budget.weight)  # s = 0.5, so k = 2, for every input
    static = best_static(model, rows)
    for layer, block in enumerate(model.encoder.blocks):
        allocation = block.attention.allocator(torch.randn(1, 3, 16), None, 0.0)
        assert allocation.weights is not None
        assert torch.allclose(static[layer], allocation.weights[0])
        assert (static[layer] > 0).tolist() == [False, True, False, True]


def test_rows_are_drawn_once_and_kept_whole() -> None:
    encoded = make_rows()
    rows = some_rows(encoded, 7)
    assert len(rows) == 7
    assert rows.tolist() == some_rows(encoded, 7).tolist() == sorted(rows)
    assert some_rows(encoded, None).tolist() == list(range(30))
    few = encoded.select(rows)
    for place, row in enumerate(rows):
        mine = few.tokens[few.offsets[place] : few.offsets[place + 1]]
        assert mine.tolist() == encoded.tokens[encoded.offsets[row] : encoded.offsets[row + 1]].tolist()
    assert few.lines.tolist() == (rows + 1).tolist()


def test_probes_of_both_models() -> None:
    rows = make_rows()
    for model in (make_model(), make_model(allocator="all")):
        outcome = score(TorchEngine(model), rows)
        found = probe(model, rows, rows, outcome, 20)
        assert found["rows"] == 20
        assert set(found["removed"]) == {"1", "2"}
        assert found["removed_all"]["k_over_h"] == 0
        assert ("override" in found) == (model.config.allocator == "learned")
    assert probe(make_model(), rows, rows, outcome, None)["override"]["1"]["k_over_h"] == 1
