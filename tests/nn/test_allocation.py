"""Allocation, equation by equation, against numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from budgetformer.errors import UsageError
from budgetformer.nn import AllHeads, Dial, Exploration, FixedBudget, LearnedHeads, RandomHeads, Selection, StaticHeads
from budgetformer.nn.allocation import BudgetNet, allocate, pool, top_k

P = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
HALF = torch.tensor([0.5])


def gates(**selection: Any) -> tuple[Exploration, Selection]:
    return Exploration(), Selection(**selection)


def test_pooling_is_the_mean_over_real_tokens() -> None:
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [99.0, 99.0]]])
    mask = torch.tensor([[True, True, False]])
    assert pool(x, mask).tolist() == [[2.0, 3.0]]
    torch.testing.assert_close(pool(x, None), torch.tensor([[103 / 3, 35.0]]))


def test_budget_is_the_sigmoid_of_a_two_layer_net() -> None:
    net = BudgetNet(2)
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        net[0].bias.copy_(torch.tensor([0.0, 1.0]))
        net[2].weight.copy_(torch.tensor([[0.5, 7.0]]))
        net[2].bias.fill_(math.log(3) - 1)
    # h = (2, 3): (2, -2) -> relu (2, 0) -> 0.5 * 2 + ln 3 - 1 = ln 3 -> 3/4
    assert net(torch.tensor([[2.0, 3.0]])).item() == pytest.approx(0.75)


def learned_with_scores(bias: list[float], **selection: Any) -> LearnedHeads:
    allocator = LearnedHeads(2, len(bias), *gates(**selection))
    with torch.no_grad():
        allocator.scorer.weight.zero_()
        allocator.scorer.bias.copy_(torch.tensor(bias))
        for layer in (allocator.budget_net[0], allocator.budget_net[2]):
            layer.weight.zero_()
            layer.bias.zero_()
    return allocator


def test_relevance_is_a_softmax_at_the_temperature_of_that_progress() -> None:
    tau = 2.0  # tau(0)
    scores = [tau * math.log(share) for share in (1, 2, 3, 4)]
    allocation = learned_with_scores(scores).eval()(torch.ones(1, 3, 2), None, 0.0)
    torch.testing.assert_close(allocation.relevance, P)
    assert allocation.budget.item() == 0.5


def test_weights_are_s_times_h_times_p() -> None:
    allocation = allocate(HALF, P, Selection(), keep_top=False)
    assert allocation.weights is not None
    torch.testing.assert_close(allocation.weights, torch.tensor([[0.2, 0.4, 0.6, 0.8]]))
    assert allocation.active.all()


def test_top_k_keeps_the_most_relevant_heads_and_loses_the_rest() -> None:
    allocation = allocate(HALF, P, Selection(), keep_top=True)
    assert allocation.weights is not None
    assert allocation.heads.tolist() == [2]
    assert allocation.active.tolist() == [[False, False, True, True]]
    torch.testing.assert_close(allocation.weights, torch.tensor([[0.0, 0.0, 0.6, 0.8]]))


def test_renormalised_weights_keep_the_mass_of_the_dropped_heads() -> None:
    allocation = allocate(HALF, P, Selection(renormalize=True), keep_top=True)
    assert allocation.weights is not None
    torch.testing.assert_close(allocation.weights, torch.tensor([[0.0, 0.0, 6 / 7, 8 / 7]]))


def test_a_budget_that_counts_heads_does_not_scale_them() -> None:
    counting = Selection(budget_as="count")
    for s in (0.5, 0.7):  # both keep two of four heads
        allocation = allocate(torch.tensor([s]), P, counting, keep_top=True)
        assert allocation.active.tolist() == [[False, False, True, True]]
        torch.testing.assert_close(allocation.weights, torch.tensor([[0.0, 0.0, 6 / 7, 8 / 7]]))
    none = allocate(torch.tensor([0.1]), P, Selection(budget_as="count", min_heads=0), keep_top=True)
    assert none.weights is not None
    assert none.weights.tolist() == [[0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("keep_top", [True, False])
def test_a_budget_that_counts_heads_learns_what_one_head_more_would_do(keep_top: bool) -> None:
    s = torch.tensor([0.5], requires_grad=True)
    allocation = allocate(s, P, Selection(budget_as="count"), keep_top=keep_top)
    assert allocation.weights is not None
    expected = torch.tensor([[0.0, 1.0, 0.0, 0.0]])  # the third head by relevance, just outside of the two
    (gradient,) = torch.autograd.grad((allocation.weights * expected).sum(), s)
    assert gradient.item() > 0


@pytest.mark.parametrize(
    ("s", "rounding", "min_heads", "k"),
    [
        (0.36, "floor", 1, 2),  # the paper's own figure, 8 heads: 2.88
        (0.36, "round", 1, 3),
        (0.36, "ceil", 1, 3),
        (0.085, "floor", 1, 1),
        (0.085, "floor", 0, 0),
        (0.0, "floor", 1, 1),
        (1.0, "floor", 1, 8),
        (0.2, "floor", 3, 3),
    ],
)
def test_number_of_heads(s: float, rounding: Any, min_heads: int, k: int) -> None:
    selection = Selection(rounding=rounding, min_heads=min_heads)
    assert selection.count(torch.tensor([s]), 8).item() == k


def test_of_equal_heads_the_first_is_taken() -> None:
    assert top_k(torch.full((1, 4), 0.25), torch.tensor([2])).tolist() == [[True, True, False, False]]


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=16),
    st.floats(0, 1, width=32),
    st.integers(0, 3),
    st.booleans(),
)
def test_weights_sum_to_s_h_and_k_stays_in_range(
    scores: list[float], s: float, min_heads: int, renormalize: bool
) -> None:
    H = len(scores)
    min_heads = min(min_heads, H)
    selection = Selection(min_heads=min_heads, renormalize=renormalize)
    p = torch.tensor([scores]).softmax(-1)
    soft = allocate(torch.tensor([s]), p, selection, keep_top=False)
    hard = allocate(torch.tensor([s]), p, selection, keep_top=True)
    assert soft.weights is not None
    assert hard.weights is not None
    torch.testing.assert_close(soft.weights.sum(), torch.tensor(s * H), atol=1e-5, rtol=1e-5)
    k = int(hard.heads)
    assert min_heads <= k <= H
    assert hard.active.sum() == k
    assert (hard.weights[~hard.active] == 0).all()
    if k:
        assert hard.relevance[hard.active].min() >= hard.relevance[~hard.active].max() if k < H else True
    if renormalize and k:
        torch.testing.assert_close(hard.weights.sum(), torch.tensor(s * H), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dial", "heads"),
    [
        ("learned", 4),
        ("full", 8),
        ("fixed:0.25", 2),
        ("fixed:0.01", 1),
        ("max:0.25", 2),
        ("max:0.9", 4),
        ("fixed:1", 8),
    ],
)
def test_the_dial_sets_the_number_of_heads_and_never_the_weights(dial: str, heads: int) -> None:
    p = torch.arange(1.0, 9.0)[None] / 36
    learned = allocate(HALF, p, Selection(), keep_top=False)
    dialled = allocate(HALF, p, Selection(), keep_top=True, dial=Dial.parse(dial))
    assert dialled.heads.tolist() == [heads]
    assert learned.weights is not None
    assert dialled.weights is not None
    assert torch.equal(dialled.weights[dialled.active], learned.weights[dialled.active])


@given(st.integers(1, 64), st.data())
def test_a_dial_of_k_over_h_means_k_heads(H: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, H))
    assert Selection().apply_budget(torch.tensor([1]), Dial("fixed", k / H), H).item() == k


def test_override_is_the_papers_ablation_and_does_change_the_weights() -> None:
    allocator = learned_with_scores([0.0, 1.0, 2.0, 3.0]).eval()
    x = torch.ones(1, 3, 2)
    half, full = allocator(x, None, 0.0, Dial()), allocator(x, None, 0.0, Dial("override", 1.0))
    assert full.heads.tolist() == [4]
    torch.testing.assert_close(full.weights[:, -1], 2 * half.weights[:, -1])


def test_the_dial_does_nothing_in_training() -> None:
    allocator = learned_with_scores([0.0, 1.0, 2.0, 3.0], topk_from=0.0).train()
    assert allocator(torch.ones(1, 3, 2), None, 0.5, Dial("full")).active.sum() == 2


def test_noise_is_for_training_only_and_fades() -> None:
    allocator = learned_with_scores([0.0, 0.0, 0.0, 0.0])
    x = torch.ones(5000, 1, 2)
    logits = allocator.train()(x, None, 0.5).relevance.log() * Exploration().temperature(0.5)
    # Centred noise of standard deviation sigma_max / 2 loses a quarter of its variance to the mean over 4 heads.
    assert (logits - logits.mean(-1, keepdim=True)).std().item() == pytest.approx(0.25 * math.sqrt(3 / 4), rel=0.03)
    for quiet in (allocator.train()(x, None, 1.0), allocator.eval()(x, None, 0.0)):
        torch.testing.assert_close(quiet.relevance, torch.full((5000, 4), 0.25))


@pytest.mark.parametrize(
    ("topk_from", "progress", "remaining"), [(None, 1.0, 4), (0.0, 0.0, 2), (0.6, 0.5, 4), (0.6, 0.6, 2)]
)
def test_top_k_in_training_starts_at_the_chosen_progress(
    topk_from: float | None, progress: float, remaining: int
) -> None:
    allocator = learned_with_scores([0.0, 1.0, 2.0, 3.0], topk_from=topk_from).train()
    assert allocator(torch.ones(1, 3, 2), None, progress).active.sum() == remaining


def test_all_heads_is_the_standard_transformer() -> None:
    allocator = AllHeads(4)
    allocation = allocator(torch.ones(2, 3, 8), None, 0.3, Dial("fixed", 0.25))
    assert list(allocator.parameters()) == []
    assert allocation.weights is None
    assert allocation.active.all()
    assert allocation.heads.tolist() == [4, 4]


def test_fixed_budget_has_a_scorer_and_no_budget_net() -> None:
    allocator = FixedBudget(8, 4, *gates(), 0.5).eval()
    assert sum(p.numel() for p in allocator.parameters()) == 8 * 4 + 4
    assert allocator(torch.randn(3, 5, 8), None, 1.0).heads.tolist() == [2, 2, 2]


def test_random_heads_keep_the_learned_budget_and_forget_the_input() -> None:
    allocator = RandomHeads(8, 4, *gates()).eval()
    x = torch.randn(1, 5, 8).expand(400, -1, -1)
    allocation = allocator(x, None, 1.0)
    assert (allocation.budget == allocation.budget[0]).all()
    share = allocation.active.float().mean(0)
    expected = int(allocation.heads[0]) / 4
    assert torch.all((share - expected).abs() < 0.15), share


def test_random_dial_draws_scores_but_keeps_s() -> None:
    allocator = learned_with_scores([0.0, 1.0, 2.0, 3.0]).eval()
    allocation = allocator(torch.ones(400, 3, 2), None, 1.0, Dial("random"))
    assert (allocation.heads == 2).all()
    assert (allocation.active.float().mean(0) > 0.3).all()


def test_static_heads_do_not_look_at_the_input() -> None:
    allocator = StaticHeads(4, *gates()).eval()
    with torch.no_grad():
        allocator.score.copy_(torch.tensor([3.0, 1.0, 2.0, 0.0]))
    a, b = (allocator(torch.randn(1, 5, 8), None, 1.0) for _ in range(2))
    assert torch.equal(a.relevance, b.relevance)
    assert a.active.tolist() == [[True, False, True, False]]
    assert sum(p.numel() for p in allocator.parameters()) == 1 + 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gates_compute_in_fp32_whatever_the_precision(dtype: torch.dtype) -> None:
    allocator = LearnedHeads(8, 4, *gates()).to(dtype).eval()
    x = torch.randn(3, 5, 8).to(dtype)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0, 2:] = False
    allocation = allocator(x, mask, 1.0)
    for tensor in (allocation.budget, allocation.relevance, allocation.weights):
        assert tensor.dtype == torch.float32
    reference = LearnedHeads(8, 4, *gates()).eval()
    reference.load_state_dict({k: v.float() for k, v in allocator.state_dict().items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):  # an outer autocast must not reach the gates
        same = reference(x.float(), mask, 1.0)
    torch.testing.assert_close(allocation.budget, same.budget, atol=0, rtol=0)
    torch.testing.assert_close(allocation.relevance, same.relevance, atol=0, rtol=0)


def test_pool_padding_is_the_mean_over_all_positions() -> None:
    allocator = LearnedHeads(2, 4, *gates(pool_padding=True)).eval()
    x, mask = torch.randn(1, 4, 2), torch.tensor([[True, True, False, False]])
    seen: list[Tensor] = []
    allocator.scorer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    allocator(x, mask, 1.0)
    torch.testing.assert_close(seen[0], x.mean(1))


@pytest.mark.parametrize("text", ["learned", "full", "fixed:0.25", "max:0.5", "override:1", "random"])
def test_dials_read_as_they_print(text: str) -> None:
    assert str(Dial.parse(text)) == text


@given(st.sampled_from(["fixed", "max", "mean", "override"]), st.floats(0, 1))
def test_a_dial_prints_what_reads_back_the_same(mode: str, value: float) -> None:
    assert Dial.parse(str(Dial(mode, value))) == Dial(mode, value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["fixed", "fixed:", "fixed:x", "fixed:1.5", "max:-1", "fixed:nan", "half", "full:1", ""]
)
def test_a_wrong_dial_names_itself_and_the_remedy(text: str) -> None:
    with pytest.raises(UsageError, match=r"budget .*(give|fraction of heads)"):
        Dial.parse(text)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"min_heads": -1}, "min_heads"),
        ({"budget_as": "both"}, "budget_as"),
        ({"rounding": "up"}, "rounding"),
        ({"topk_from": 2.0}, "topk_from"),
    ],
)
def test_impossible_selections_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        Selection(**options)


@pytest.mark.parametrize("rounding", ["floor", "round", "ceil"])
def test_s_of_k_over_h_means_k_heads(rounding: str) -> None:
    selection = Selection(min_heads=0, rounding=rounding)  # type: ignore[arg-type]
    pairs = [(k, H) for H in range(1, 65) for k in range(H + 1)]
    assert [(k, H) for k, H in pairs if int(selection.count(torch.tensor([k / H]), H)) != k] == []


@pytest.mark.parametrize(("mode", "value"), [("fixed", None), ("mean", None), ("learned", 0.3), ("full", 1.0)])
def test_a_dial_has_a_value_exactly_where_its_mode_takes_one(mode: str, value: float | None) -> None:
    with pytest.raises(UsageError, match=r"is not known: give a share .* such as 0\.3, learned, full, fixed:X"):
        Dial(mode, value)  # type: ignore[arg-type]
