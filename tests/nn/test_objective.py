"""Every part of the loss against numbers computed by hand."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from budgetformer.errors import UsageError
from budgetformer.nn import Exploration, Objective, Selection
from budgetformer.nn.allocation import Allocation, allocate
from budgetformer.nn.objective import (
    allocation_losses,
    budget_penalty,
    entropy_loss,
    ranked_losses,
    relevance_entropy,
    task_loss,
    violation,
)
from budgetformer.nn.ranking import RankingOptions

PAPER = Objective()
RANKED = RankingOptions(target_budget=0.5, cost_weight=0.1, ramp=0.0)
P = torch.tensor([[0.1, 0.2, 0.3, 0.4]])  # entropy 1.2798542 nats


@pytest.mark.parametrize(("s", "v"), [(0.05, 0.05), (0.1, 0.0), (0.5, 0.0), (0.9, 0.0), (0.95, 0.05), (0.0, 0.1)])
def test_violation(s: float, v: float) -> None:
    assert violation(torch.tensor(s), 0.1, 0.9).item() == pytest.approx(v, abs=1e-7)


@pytest.mark.parametrize(
    ("s", "penalty"),
    [(0.05, 1.25e-4), (0.08, 8.4e-6), (0.5, 0.0), (1.0, 5e-4)],  # alpha: 0.05 (capped), 0.021, -, 0.05 (capped)
)
def test_budget_penalty(s: float, penalty: float) -> None:
    assert budget_penalty(torch.tensor(s), PAPER).item() == pytest.approx(penalty, abs=1e-9)


def test_gradient_flows_through_alpha() -> None:
    s = torch.tensor(0.08, requires_grad=True)
    budget_penalty(s, PAPER).backward()
    # (a + v) v^2 with a = 0.001, v = 0.02: d/dv = 2 a v + 3 v^2 = 0.00124, dv/ds = -1
    assert s.grad is not None
    assert s.grad.item() == pytest.approx(-0.00124, rel=1e-4)


@given(st.floats(0.1015625, 0.8984375, width=32))
def test_the_hinge_is_zero_and_flat_inside_the_interval(value: float) -> None:
    s = torch.tensor(value, requires_grad=True)
    penalty = budget_penalty(s, PAPER)
    penalty.backward()
    assert s.grad is not None
    assert penalty.item() == 0
    assert s.grad.item() == 0


def test_entropy_by_hand() -> None:
    assert relevance_entropy(P).item() == pytest.approx(1.2798542, abs=1e-6)
    assert relevance_entropy(torch.tensor([[0.0, 1.0]])).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("option", "progress", "loss"),
    [
        ("intended", 0.0, -0.05 * 1.2798542),
        ("intended", 1.0, 0.05 * 1.2798542),
        ("printed", 0.0, 0.05 * 1.2798542),
        ("printed", 1.0, -0.05 * 1.2798542),
        ("printed", 0.5, 0.0),
        ("off", 0.0, 0.0),
    ],
)
def test_entropy_loss(option: Any, progress: float, loss: float) -> None:
    beta = Exploration().entropy_weight(progress)
    assert entropy_loss(P, beta, Objective(entropy=option)).item() == pytest.approx(loss, abs=1e-7)


@pytest.mark.parametrize(
    ("option", "progress", "entropy_rises"),
    [("intended", 0.0, True), ("intended", 1.0, False), ("printed", 0.0, False), ("printed", 1.0, True)],
)
def test_a_gradient_step_moves_entropy_the_way_the_option_says(
    option: Any, progress: float, entropy_rises: bool
) -> None:
    scores = P.log().requires_grad_()
    loss = entropy_loss(scores.softmax(-1), Exploration().entropy_weight(progress), Objective(entropy=option))
    loss.sum().backward()
    assert scores.grad is not None
    before, after = relevance_entropy(P), relevance_entropy((scores - scores.grad).softmax(-1))
    assert bool(after > before) is entropy_rises


def layer(s: list[float]) -> Allocation:
    return allocate(torch.tensor(s), P.expand(len(s), -1), Selection(), keep_top=False)


def test_parts_are_means_over_batch_and_layers() -> None:
    layers = [layer([0.05, 0.5]), layer([0.08, 0.95])]
    parts = allocation_losses(layers, Objective(cost_weight=0.1), beta=-0.05)
    assert set(parts) == {"budget", "entropy", "cost"}
    assert parts["budget"].item() == pytest.approx((1.25e-4 + 0 + 8.4e-6 + 1.25e-4) / 4, rel=1e-4)
    assert parts["entropy"].item() == pytest.approx(-0.05 * 1.2798542)
    assert parts["cost"].item() == pytest.approx(0.1 * (0.05 + 0.5 + 0.08 + 0.95) / 4)


def test_target_budget_is_a_mean_to_reach_in_each_layer() -> None:
    layers = [layer([0.2, 0.4]), layer([0.5, 0.7])]
    parts = allocation_losses(layers, Objective(target_budget=[0.3, 0.5], target_weight=2.0), beta=0.0)
    assert parts["target"].item() == pytest.approx(2.0 * (0.0 + 0.1**2) / 2, abs=1e-7)
    same = allocation_losses(layers, Objective(target_budget=0.3), beta=0.0)
    assert same["target"].item() == pytest.approx((0.0 + 0.3**2) / 2, abs=1e-7)
    with pytest.raises(UsageError, match="target_budget has 3 values for 2 layers"):
        allocation_losses(layers, Objective(target_budget=[0.1, 0.2, 0.3]), beta=0.0)


def ranked(executed: list[float], share: list[float], options: RankingOptions = RANKED) -> dict[str, torch.Tensor]:
    return ranked_losses([layer(executed)], torch.tensor(share), torch.arange(len(share)) + 1.0, options, progress=1.0)


def test_samples_asked_for_different_shares_do_not_make_up_for_each_other() -> None:
    assert ranked([0.4, 0.6], [0.2, 0.8])["target"].item() == pytest.approx(0.2**2)
    assert ranked([0.2, 0.8], [0.2, 0.8])["target"].item() == pytest.approx(0)
    # The target is a mean over inputs: one may take more where another takes less.
    assert ranked([0.3, 0.7, 0.9], [0.5, 0.5, 0.8])["target"].item() == pytest.approx(0.1**2 / 3)
    price_alone = RankingOptions(target_budget=None, cost_weight=1.0)
    parts = ranked([0.3, 0.6], [float("nan"), 0.5], price_alone)
    assert parts["target"].item() == pytest.approx(0.1**2 / 2)
    assert parts["cost"].item() == pytest.approx((0.3 * 1 + 0.6 * 2) / 3)


def test_ranked_losses_are_those_of_one_process_when_two_share_a_batch(tmp_path: Path) -> None:
    """Rows are dealt unevenly, and one process has no sample at the target."""
    executed, share = torch.tensor([0.3, 0.9, 0.4, 0.8, 0.7]), torch.tensor([0.5, 0.5, 0.2, 0.8, 0.5])
    parts = [[0, 1, 4], [2, 3]]

    def gradient(rows: list[int]) -> list[float]:
        leaf = executed.clone().requires_grad_()
        allocation = layer([0.5])._replace(budget=leaf[rows])
        losses = ranked_losses([allocation], share[rows], (torch.arange(5.0) + 1)[rows], RANKED, progress=1.0)
        (sum(losses.values()) * len(rows) / len(executed)).backward()  # type: ignore[union-attr]
        assert leaf.grad is not None
        return leaf.grad.tolist()

    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            code = 1
            with contextlib.suppress(BaseException):
                store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
                torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
                (tmp_path / f"{rank}.json").write_text(json.dumps(gradient(parts[rank])))
                torch.distributed.barrier()
                code = 0
            os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    shared = torch.tensor([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]).sum(dim=0)
    torch.testing.assert_close(shared, torch.tensor(gradient([0, 1, 2, 3, 4])))


def test_a_model_without_gates_has_only_its_task() -> None:
    plain = layer([0.5])._replace(weights=None)
    assert allocation_losses([plain, plain], PAPER, beta=0.05) == {}


def test_task_losses_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log()  # softmax is P
    assert task_loss(logits, torch.tensor([3]), "single_label_classification").item() == pytest.approx(0.9162907)
    assert task_loss(torch.tensor([[1.0], [4.0]]), torch.tensor([3.0, 4.0]), "regression").item() == pytest.approx(2.0)
    multi = task_loss(torch.zeros(1, 2), torch.tensor([[1, 0]]), "multi_label_classification")
    assert multi.item() == pytest.approx(0.6931472)
    smooth = task_loss(logits, torch.tensor([3]), "single_label_classification", label_smoothing=0.4)
    # 0.6 of the label's loss and 0.1 of every label's: -(0.7 ln .4 + 0.1 (ln .1 + ln .2 + ln .3))
    assert smooth.item() == pytest.approx(0.6414035 + 0.1 * 5.1159958, abs=1e-5)
    heavy = task_loss(
        logits, torch.tensor([3]), "single_label_classification", class_weights=torch.tensor([1.0, 1, 1, 2])
    )
    assert heavy.item() == pytest.approx(2 * 0.9162907)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"s_min": 0.9, "s_max": 0.1}, "s_min"),
        ({"entropy": "reversed"}, "entropy"),
        ({"cost_weight": -1.0}, "cost_weight"),
        ({"target_budget": [0.5, 1.5]}, "target_budget"),
    ],
)
def test_impossible_objectives_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        Objective(**options)
