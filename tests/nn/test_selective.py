"""The selective path against the definition: values, gradients, what it does not compute, what it may not remember."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from budgetformer.nn import AllHeads, BudgetedAttention
from budgetformer.nn.allocation import Allocation
from budgetformer.nn.selective import (
    Block,
    blocks_of,
    cheapest,
    evaluate_active,
    evaluate_blocks,
    evaluate_pairs,
    real_tokens,
)

Way = Callable[[BudgetedAttention, Tensor, Tensor | None, Tensor, Tensor | None], Tensor]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On tensors this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def definition(attention: BudgetedAttention, x: Tensor, mask: Tensor | None, weights: Tensor) -> Tensor:
    return attention.evaluate(x, mask, Allocation(weights[:, 0], weights, weights[:, 0], weights > 0, weights))


def in_blocks(
    attention: BudgetedAttention, x: Tensor, mask: Tensor | None, active: Tensor, weights: Tensor | None = None
) -> Tensor:
    B, N, D = x.shape
    spans = real_tokens(mask, B, N)
    assert spans is not None
    flat = x.reshape(B * N, D)
    y = evaluate_blocks(flat, blocks_of(active.tolist(), spans), active.shape[1], weights, attention.qkv, attention.out)
    return y.view(B, N, D)


def in_pairs(
    attention: BudgetedAttention, x: Tensor, mask: Tensor | None, active: Tensor, weights: Tensor | None = None
) -> Tensor:
    return evaluate_pairs(x, mask, active, weights, attention.qkv, attention.out)


both_ways = pytest.mark.parametrize("way", [in_blocks, in_pairs])


def padding(lengths: list[int], length: int, left: bool = False) -> Tensor:
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    return mask.flip(1) if left else mask


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    B, N = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    H, d = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    rows = st.lists(st.booleans(), min_size=H, max_size=H)
    active = torch.tensor(draw(st.lists(rows, min_size=B, max_size=B)))
    lengths = draw(st.none() | st.lists(st.integers(1, N), min_size=B, max_size=B))
    return {
        "attention": BudgetedAttention(H * d, AllHeads(H)).eval(),
        "x": torch.randn(B, N, H * d),
        "mask": None if lengths is None else padding(lengths, N, left=draw(st.booleans())),
        "active": active,
        "weights": torch.rand(B, H) * active if draw(st.booleans()) else None,
    }


@both_ways
@given(case=cases())
def test_equals_the_definition_on_real_tokens(way: Way, case: dict[str, Any]) -> None:
    attention, x, mask, active, weights = case.values()
    with torch.inference_mode():
        y = way(attention, x, mask, active, weights)
        expected = definition(attention, x, mask, active.float() if weights is None else weights)
        chosen = evaluate_active(x, mask, active, weights, attention.qkv, attention.out)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    assert y.isfinite().all()
    torch.testing.assert_close(y[real], expected[real], atol=1e-5, rtol=0)
    if chosen is not None:
        torch.testing.assert_close(chosen[real], expected[real], atol=1e-5, rtol=0)


@both_ways
@given(case=cases())
def test_gradients_equal_the_definitions(way: Way, case: dict[str, Any]) -> None:
    attention, x, mask, active, weights = case.values()
    weights = (active.float() if weights is None else weights).requires_grad_()
    leaves = [x.requires_grad_(), weights, *attention.parameters()]
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    direction = torch.randn_like(x)[real]
    ours, theirs = (
        torch.autograd.grad((y[real] * direction).sum(), leaves, allow_unused=True, materialize_grads=True)
        for y in (way(attention, x, mask, active, weights), definition(attention, x, mask, weights))
    )
    used = torch.where(active, theirs[1], 0)  # a head that is not computed tells nothing about its weight
    for got, expected in zip(ours, (theirs[0], used, *theirs[2:]), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "active",
    [
        pytest.param([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], id="nobody-has-a-head"),
        pytest.param([[1, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]], id="one-each"),
        pytest.param([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]], id="all"),
        pytest.param([[0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0]], id="the-same-for-all"),
        pytest.param([[1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]], id="mixed"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@both_ways
def test_notable_choices_in_several_precisions(way: Way, active: list[list[int]], dtype: torch.dtype) -> None:
    attention = BudgetedAttention(8, AllHeads(4)).eval().to(dtype)
    x, on, mask = torch.randn(3, 5, 8, dtype=dtype), torch.tensor(active).bool(), padding([5, 2, 4], 5)
    weights = torch.rand(3, 4) * on
    y = way(attention, x, mask, on, weights)
    assert y.dtype == dtype
    expected = definition(attention, x, mask, weights)
    torch.testing.assert_close(y[mask], expected[mask], atol=2e-3 if dtype == torch.float16 else 1e-5, rtol=0)


def test_packed_tokens_equal_padded_ones() -> None:
    attention, x, mask = BudgetedAttention(8, AllHeads(4)).eval(), torch.randn(3, 5, 8), padding([5, 2, 4], 5)
    active = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    blocks = blocks_of(active.tolist(), (range(5), range(5, 7), range(7, 11)))
    packed = evaluate_blocks(x[mask], blocks, 4, None, attention.qkv, attention.out)
    torch.testing.assert_close(packed, in_blocks(attention, x, mask, active)[mask])


def test_blocks_join_neighbouring_heads_that_the_same_samples_use() -> None:
    active = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    assert blocks_of(active.tolist(), (range(3), range(3, 5), range(6, 9))) == [
        Block(0, 2, [0, 1], [slice(0, 5)], [3, 2]),
        Block(3, 4, [0, 2], [slice(0, 3), slice(6, 9)], [3, 3]),
        Block(4, 5, [2], [slice(6, 9)], [3]),
    ]


@both_ways
@given(case=cases())
def test_only_active_pairs_are_computed(way: Way, case: dict[str, Any]) -> None:
    attention, x, mask, active, weights = case.values()
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, *args, **kwargs: 2 * a[0] * a[1] * b[1]}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        way(attention, x, mask, active, weights)
    padded = mask is None or way is in_pairs
    lengths = torch.full((x.shape[0],), x.shape[1]) if padded or mask is None else mask.sum(1)
    tokens = int((active.sum(1) * lengths).sum())
    assert counter.get_total_flops() == tokens * 8 * x.shape[2] * (x.shape[2] // active.shape[1])


def test_the_choice_of_the_cheapest_way() -> None:
    def choice(active: Tensor, lengths: list[int], length: int, width: int = 768, device: str = "cpu") -> str:
        spans = real_tokens(padding(lengths, length), len(lengths), length)
        assert spans is not None
        return cheapest(blocks_of(active.tolist(), spans), *active.shape[:1], length, width, active.shape[1], device)

    one, full = torch.eye(8).bool(), torch.ones(8, 8).bool()
    assert choice(one, [64] * 8, 64) == "blocks"
    assert choice(one[:1], [64], 64) == "blocks"
    assert choice(~full, [64] * 8, 64) == "blocks"
    assert choice(full, [256] + [64] * 7, 256) == "blocks", "padding alone is worth leaving out"
    assert choice(one, [64] * 8, 64, width=128) == "pairs"
    assert choice(one, [512] * 8, 512, device="cuda") == "pairs"
    assert choice(full, [64] * 8, 64) == "dense"
    assert choice(one[:1], [16], 16, width=64) == "dense"


def test_where_the_dense_layer_must_do_it() -> None:
    attention, x = BudgetedAttention(64, AllHeads(4)).eval(), torch.randn(2, 160, 64)
    layers = attention.qkv, attention.out
    holes = torch.ones(2, 160, dtype=torch.bool)
    holes[0, 3] = False
    nobody = torch.tensor([[True], [False]]).expand(2, 160)
    none, every = torch.zeros(2, 4).bool(), torch.ones(2, 4).bool()
    assert evaluate_active(x, holes, none, None, *layers) is None
    assert evaluate_active(x, nobody, none, None, *layers) is None
    assert evaluate_active(x, None, every, None, *layers) is None
    assert evaluate_active(x[:, :3], None, none, None, *layers) is None, "less work than a plan"
    torch.testing.assert_close(evaluate_active(x, None, none, None, *layers), attention.out.bias.expand(2, 160, 64))


def test_an_export_records_the_dense_layer() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = BudgetedAttention(8, AllHeads(4))

        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            y = evaluate_active(x, None, weights > 0, weights, self.attention.qkv, self.attention.out)
            return definition(self.attention, x, None, weights) if y is None else y

    layer, x, weights = Layer().eval(), torch.randn(2, 3, 8), torch.eye(4)[:2]
    exported = torch.export.export(layer, (x, torch.zeros(2, 4))).module()
    torch.testing.assert_close(exported(x, weights), definition(layer.attention, x, None, weights))


def _step(attention: BudgetedAttention) -> None:
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    attention.qkv(torch.randn(2, 8)).sum().backward()
    optimizer.step()


def _load(attention: BudgetedAttention, assign: bool) -> None:
    attention.load_state_dict(BudgetedAttention(8, AllHeads(4)).state_dict(), assign=assign)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_step, id="step"),
        pytest.param(lambda a: _load(a, assign=False), id="load"),
        pytest.param(lambda a: _load(a, assign=True), id="assign"),
        pytest.param(lambda a: a.qkv.weight.data.mul_(2), id="data-in-place"),
        pytest.param(lambda a: setattr(a.out.weight, "data", torch.randn(8, 8)), id="data-replaced"),
        pytest.param(lambda a: setattr(a.qkv, "bias", torch.nn.Parameter(torch.randn(24))), id="parameter"),
    ],
)
@both_ways
def test_changed_weights_count_at_once(way: Way, change: Callable[[BudgetedAttention], None]) -> None:
    attention, x = BudgetedAttention(8, AllHeads(4)).eval(), torch.randn(2, 3, 8)
    weights = torch.tensor([[0.5, 0, 0, 1], [0, 2.0, 0, 0]])
    with torch.inference_mode():
        before = way(attention, x, None, weights > 0, weights)
    twin = copy.deepcopy(attention)
    change(attention)
    with torch.inference_mode():
        after = way(attention, x, None, weights > 0, weights)
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, definition(attention, x, None, weights))
        torch.testing.assert_close(way(twin, x, None, weights > 0, weights), before)


@both_ways
def test_the_parameters_are_never_written_to(way: Way) -> None:
    attention, x = BudgetedAttention(8, AllHeads(4)).eval(), torch.randn(1, 1, 8)
    saved = copy.deepcopy(attention.state_dict())
    with torch.inference_mode():
        way(attention, x, None, torch.ones(1, 4).bool(), None)
    torch.testing.assert_close(attention.state_dict(), saved, atol=0, rtol=0)
