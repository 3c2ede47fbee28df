"""Feed-forward layers in groups: the definition by hand, the fast way equal to it, the price of an order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from budgetformer.nn.allocation import LayerThreshold
from budgetformer.nn.feedforward import BudgetedFeedForward
from budgetformer.nn.ranking import FrozenHeads, OrderedHeads, cumulative_prices, threshold_at, thresholds

WIDTH, NEURONS, GROUPS = 8, 12, 4


def layer(*, gated: bool = False, bias: bool = True) -> BudgetedFeedForward:
    gate = OrderedHeads(GROUPS)
    with torch.no_grad():
        gate.score.copy_(torch.rand(GROUPS))
    inner, outer = nn.Linear(WIDTH, (1 + gated) * NEURONS, bias), nn.Linear(NEURONS, WIDTH, bias)
    return BudgetedFeedForward(gate, inner, outer, nn.functional.gelu).eval()


def test_a_group_that_is_left_out_adds_nothing_by_hand() -> None:
    inner, outer = nn.Linear(1, 4), nn.Linear(4, 1)
    part = BudgetedFeedForward(OrderedHeads(2), inner, outer, torch.relu)
    with torch.no_grad():
        inner.weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [-1.0]]))
        inner.bias.copy_(torch.tensor([0.0, 1.0, 0.0, 0.0]))
        outer.weight.copy_(torch.tensor([[1.0, 10.0, 100.0, 1000.0]]))
        outer.bias.fill_(0.5)
        x, weights = torch.tensor([[[2.0]], [[2.0]]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        # relu(2, 5, 6, -2) = 2, 5, 6, 0
        assert part.evaluate(x, weights).flatten().tolist() == [52.5, 652.5]


def test_a_gated_linear_unit_by_hand() -> None:
    inner, outer = nn.Linear(1, 4), nn.Linear(2, 1)
    part = BudgetedFeedForward(OrderedHeads(2), inner, outer, torch.relu)
    with torch.no_grad():
        inner.weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))  # a of both neurons, then b of both
        inner.bias.zero_()
        outer.weight.copy_(torch.tensor([[1.0, 10.0]]))
        outer.bias.zero_()
        x = torch.ones(1, 1, 1)
        assert part.evaluate(x, torch.ones(1, 2)).item() == 1 * 3 + 10 * 2 * 4
        assert part.evaluate_active(x, None, torch.tensor([[False, True]])).item() == 10 * 2 * 4


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 999), gated=st.booleans(), bias=st.booleans(), share=st.floats(0, 1))
def test_only_the_active_groups_equal_the_definition(seed: int, gated: bool, bias: bool, share: float) -> None:
    torch.manual_seed(seed)
    part, x = layer(gated=gated, bias=bias), torch.randn(3, 5, WIDTH)
    cut = float(threshold_at(torch.tensor([share]), thresholds(part.allocator.score)))
    slow, weights = part(x, None, 1.0, LayerThreshold("mean", cut))  # with gradients: the definition
    assert slow.requires_grad or not weights.any()
    with torch.no_grad():
        fast, same = part(x, None, 1.0, LayerThreshold("mean", cut))
    assert torch.equal(weights, same)
    assert int(weights[0].sum()) == int(share * GROUPS + 1e-6)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_sorting_neurons_changes_nothing_and_frozen_groups_are_cut_out(gated: bool) -> None:
    torch.manual_seed(0)
    part, x, order = layer(gated=gated), torch.randn(2, 3, WIDTH), torch.randperm(NEURONS)
    columns = part.outer.weight.detach().clone()
    with torch.no_grad():
        before = part.evaluate(x, None)
        part.select_neurons(order)
        torch.testing.assert_close(part.evaluate(x, None), before)
        assert torch.equal(part.outer.weight, columns[:, order])
        some = part.evaluate_active(x, None, torch.tensor([[True, False, False, True]]).expand(2, -1))
        frozen = BudgetedFeedForward(FrozenHeads(GROUPS, [0, 3]), part.inner, part.outer, part.activation)
        y, weights = frozen(x, None, 1.0)
        torch.testing.assert_close(y, some)
    assert weights.tolist() == [[1, 0, 0, 1]] * 2
    assert frozen.inner.weight.shape == ((1 + gated) * 6, WIDTH)
    assert frozen.outer.weight.shape == (WIDTH, 6)


def test_without_any_group_the_bias_is_left() -> None:
    part, x = layer(), torch.randn(2, 4, WIDTH)
    frozen = BudgetedFeedForward(FrozenHeads(GROUPS, []), part.inner, part.outer, part.activation)
    y, weights = frozen(x, None, 1.0)
    assert torch.equal(y, part.outer.bias.expand(2, 4, WIDTH))
    assert not weights.any()


def test_an_order_is_cut_at_the_cumulative_price_by_hand() -> None:
    scores, prices = torch.tensor([0.9, 0.1, 0.5, 0.7]), torch.tensor([1.0, 4.0, 3.0, 2.0])
    paid = cumulative_prices(scores, prices)
    assert paid.tolist() == pytest.approx([0.1, 0.3, 0.6, 1.0])
    shares = torch.tensor([0.0, 0.1, 0.29, 0.3, 0.59, 0.6, 1.0])
    passing = [(scores > cut).sum().item() for cut in threshold_at(shares, thresholds(scores), paid)[:, 0]]
    assert passing == [0, 1, 1, 2, 2, 3, 4]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.floats(0, 1), st.integers(0, 99))
def test_a_share_pays_for_as_many_units_as_it_can_in_their_order(prices: list[int], share: float, seed: int) -> None:
    torch.manual_seed(seed)
    scores, price = torch.rand(len(prices)), torch.tensor(prices, dtype=torch.float32)
    passing = scores > threshold_at(torch.tensor([share]), thresholds(scores), cumulative_prices(scores, price))[0]
    assert price[passing].sum() <= share * price.sum() + 1e-2
    if not passing.all():
        following = scores.masked_fill(passing, -1).argmax()
        assert price[passing].sum() + price[following] > share * price.sum() - 1e-2
