from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from budgetformer.dial import Dial
from budgetformer.errors import UsageError
from budgetformer.nn.attention import BudgetedAttention
from budgetformer.nn.ranking import FrozenHeads, RankedHeads, resolve_budget, threshold_at, thresholds

LAYERS, HEADS, WIDTH = 3, 4, 8


def gates(per_input: float = 0.0) -> list[RankedHeads]:
    made = [RankedHeads(HEADS, WIDTH).eval() for _ in range(LAYERS)]
    with torch.no_grad():
        for gate, score in zip(made, torch.rand(LAYERS, HEADS), strict=True):
            gate.score.copy_(score)
            gate.scorer.weight.normal_(std=per_input)
    return made


def allocated(made: list[RankedHeads], dial: str, learned: float | None = 0.5, batch: int = 6) -> torch.Tensor:
    cuts = resolve_budget(Dial.parse(dial), torch.stack([g.score for g in made]), learned)
    x = torch.randn(batch, 5, WIDTH)
    with torch.no_grad():
        return torch.stack([g(x, None, 1.0, cut).active for g, cut in zip(made, cuts, strict=True)], dim=1)  # (B, L, H)


@given(share=st.floats(0, 1), seed=st.integers(0, 99))
def test_a_share_of_all_heads_is_kept_by_the_global_order(share: float, seed: int) -> None:
    torch.manual_seed(seed)
    made = gates()
    active = allocated(made, f"mean:{share}")
    assert (active.sum(dim=(1, 2)) == int(share * LAYERS * HEADS + 1e-6)).all()
    scores = torch.stack([g.score for g in made]).detach()
    remaining = active[0]
    if remaining.any() and not remaining.all():
        assert scores[remaining].min() > scores[~remaining].max()


@given(share=st.floats(0, 1), seed=st.integers(0, 99))
def test_fixed_is_exact_for_every_input_and_max_a_ceiling(share: float, seed: int) -> None:
    torch.manual_seed(seed)
    made = gates(per_input=0.5)
    expected = int(share * LAYERS * HEADS + 1e-6)
    assert (allocated(made, f"fixed:{share}").sum(dim=(1, 2)) == expected).all()
    assert (allocated(made, f"max:{share}").sum(dim=(1, 2)) <= expected).all()


def test_inputs_differ_in_their_number_of_heads_and_a_layer_may_get_none() -> None:
    torch.manual_seed(1)
    counts = allocated(gates(per_input=1.0), "mean:0.5", batch=40).sum(dim=2)
    assert counts.sum(dim=1).unique().numel() > 1
    assert (counts == 0).any()


def test_the_other_positions_of_the_dial() -> None:
    made = gates()
    assert allocated(made, "full").all()
    assert not allocated(made, "mean:0").any()
    assert allocated(made, "learned", learned=0.25)[0].sum() == 3
    assert allocated(made, "learned", learned=None).all()  # scores begin above 0
    assert (allocated(made, "random", learned=0.5).sum(dim=(1, 2)) == 6).all()
    assert (allocated(made, "override:0.5") == allocated(made, "mean:0.5")).all()


def test_thresholds_by_hand() -> None:
    table = thresholds(torch.tensor([[0.1, 0.4], [0.3, 0.2]]))
    torch.testing.assert_close(table[1:4], torch.tensor([0.35, 0.25, 0.15]))
    assert table[0] == float("inf")
    assert table[4] == float("-inf")
    shares = torch.tensor([0.0, 0.26, 0.5, 1.0])
    assert threshold_at(shares, table)[:, 0].tolist() == [table[0], table[1], table[2], table[4]]


def test_kept_heads_have_weight_one_and_both_parts_of_the_score_learn() -> None:
    gate = RankedHeads(HEADS, WIDTH)
    cut = resolve_budget(Dial("mean", 0.5), gate.score[None], None)[0]
    allocation = gate(torch.randn(3, 5, WIDTH), None, 0.5, cut)
    assert allocation.weights is not None
    torch.testing.assert_close(allocation.weights, allocation.active.float())
    torch.testing.assert_close(allocation.budget, torch.full((3,), 0.5))
    (allocation.weights * torch.randn(3, HEADS)).sum().backward()
    assert gate.score.grad is not None
    assert gate.score.grad.abs().min() > 0
    assert gate.scorer.weight.grad.abs().max() > 0


def test_renormalized_weights_add_up_to_all_heads() -> None:
    gate = RankedHeads(HEADS, WIDTH, renormalize=True)
    cut = resolve_budget(Dial("mean", 0.5), gate.score[None], None)[0]
    weights = gate(torch.randn(3, 5, WIDTH), None, 0.5, cut).weights
    torch.testing.assert_close(weights.sum(dim=1), torch.full((3,), float(HEADS)))


def test_alone_a_gate_ranks_its_own_heads() -> None:
    gate = RankedHeads(HEADS, WIDTH).eval()
    with torch.no_grad():
        assert gate(torch.randn(2, 3, WIDTH), None, 1.0, Dial("fixed", 0.5)).active[:, :2].all()


def test_given_heads_are_the_same_for_every_input() -> None:
    attention = BudgetedAttention(WIDTH, FrozenHeads(HEADS, [2, 0])).eval()
    _, allocation = attention(torch.randn(2, 3, WIDTH), None, 1.0)
    assert allocation.active.tolist() == [[True, False, True, False]] * 2
    with pytest.raises(UsageError, match="head 4 does not exist: heads are 0 to 3"):
        FrozenHeads(HEADS, [4])
