"""Attention against a head computed by hand, and its maps against its output."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from budgetformer.errors import UsageError
from budgetformer.nn import AllHeads, BudgetedAttention, Exploration, LearnedHeads, Selection
from budgetformer.nn.allocation import Allocation
from budgetformer.nn.selective import attend


def weighted(weights: list[list[float]]) -> Allocation:
    w = torch.tensor(weights)
    return Allocation(w.mean(1), w, (w > 0).sum(1), w > 0, w)


@pytest.fixture
def by_hand() -> BudgetedAttention:
    """Two heads of width 1. Head 0: q = x0, k = ln3 x0, v = x1. Head 1: q = k = 0, v = x0. W_O swaps."""
    attention = BudgetedAttention(2, AllHeads(2))
    with torch.no_grad():
        rows = [[1.0, 0], [math.log(3), 0], [0, 1.0], [0, 0], [0, 0], [1.0, 0]]
        attention.qkv.weight.copy_(torch.tensor(rows))
        attention.qkv.bias.zero_()
        attention.out.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        attention.out.bias.copy_(torch.tensor([0.1, 0.2]))
    return attention.eval()


X = torch.tensor([[[1.0, 10.0], [0.0, 20.0]]])
# Head 0: token 0 attends (3/4, 1/4) -> 12.5, token 1 (1/2, 1/2) -> 15. Head 1: the mean of x0 -> 0.5.


def test_weighted_heads_by_hand(by_hand: BudgetedAttention) -> None:
    y = by_hand.evaluate(X, None, weighted([[0.5, 2.0]]))
    torch.testing.assert_close(y, torch.tensor([[[1.1, 6.45], [1.1, 7.7]]]))


def test_a_head_of_weight_zero_contributes_nothing(by_hand: BudgetedAttention) -> None:
    y = by_hand.evaluate(X, None, weighted([[0.5, 0.0]]))
    torch.testing.assert_close(y, torch.tensor([[[0.1, 6.45], [0.1, 7.7]]]))


def test_all_heads_is_standard_attention(by_hand: BudgetedAttention) -> None:
    y, allocation = by_hand(X, None, 0.0)
    assert allocation.weights is None
    torch.testing.assert_close(y, torch.tensor([[[0.6, 12.7], [0.6, 15.2]]]))


def test_padding_is_not_attended_to(by_hand: BudgetedAttention) -> None:
    padded = torch.cat([X, torch.full((1, 3, 2), 7.0)], dim=1)
    mask = torch.tensor([[True, True, False, False, False]])
    y, _ = by_hand(padded, mask, 0.0)
    torch.testing.assert_close(y[:, :2], torch.tensor([[[0.6, 12.7], [0.6, 15.2]]]))


def test_maps_by_hand_and_for_the_wanted_heads_only(by_hand: BudgetedAttention) -> None:
    maps = by_hand.maps(X, None, [1, 0])
    torch.testing.assert_close(maps[0, 0], torch.full((2, 2), 0.5))
    torch.testing.assert_close(maps[0, 1], torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    with pytest.raises(UsageError, match="head 2 does not exist"):
        by_hand.maps(X, None, [2])


def test_standard_attention_equals_torchs_own() -> None:
    ours = BudgetedAttention(16, AllHeads(4)).eval()
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight.view(4, 3, 4, 16).transpose(0, 1).reshape(48, 16))
        theirs.in_proj_bias.copy_(ours.qkv.bias.view(4, 3, 4).transpose(0, 1).reshape(48))
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    x, mask = torch.randn(3, 7, 16), torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = False
    expected: Tensor = theirs(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
    torch.testing.assert_close(ours(x, mask, 0.0)[0][mask], expected[mask], atol=1e-6, rtol=1e-5)


def test_head_count_must_divide_the_width() -> None:
    with pytest.raises(UsageError, match="hidden_size=10 is not divisible by num_attention_heads=4"):
        BudgetedAttention(10, LearnedHeads(10, 4, Exploration(), Selection()))


def test_training_in_bf16_attends_in_fp32_on_a_cpu() -> None:
    """The same up to bf16's digits as torch's bf16 attention, whose backward pass is slow; gradients too."""
    torch.manual_seed(0)
    start = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])

    def attended(dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        parts = [part.to(dtype).requires_grad_() for part in start]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = attend(*parts, mask)
        y.float().square().sum().backward()
        return y, [part.grad.float() for part in parts if part.grad is not None]

    (y, gradients), (expected, expected_gradients) = attended(torch.bfloat16), attended(torch.float32)
    assert y.dtype == torch.bfloat16
    assert y.grad_fn is not None
    assert y.grad_fn.next_functions[0][0].name() == "ScaledDotProductFlashAttentionForCpuBackward0"  # type: ignore[union-attr]
    assert y.grad_fn.name() == "ToCopyBackward0"  # from fp32
    torch.testing.assert_close(y.float(), expected, atol=0.02, rtol=0.02)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)
