"""Groups of feed-forward neurons in one order with the heads: every architecture, exits, frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from budgetformer.cost.flops import Shape, count
from budgetformer.engine.scores import score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import UsageError
from budgetformer.evaluate import summarize
from budgetformer.models.bases import base_hash, load_base
from budgetformer.models.importance import calibrate_thresholds, rank_heads, sort_units
from budgetformer.models.model import BudgetFormerConfig, retrofit
from budgetformer.models.model import BudgetFormerForSequenceClassification as Model
from budgetformer.nn import attention, feedforward
from budgetformer.nn.feedforward import BudgetedFeedForward
from budgetformer.nn.ranking import RankedHeads, cumulative_prices
from budgetformer.nn.selective import Costs
from tests.models.test_retrofit import LABELS, batches, encoded
from tests.models.tiny import HEADS, KINDS, LAYERS, ragged, tiny

FREE = Costs(0, 0, 0)  # blocks cost nothing by themselves, so they run wherever they save something
ORDER, RANKED = {"kind": "order", "group_size": 16}, {"kind": "ranked", "group_size": 16}


def shuffled(kind: str, gates: dict[str, Any] = ORDER, **options: Any) -> Model:
    model = retrofit(tiny(kind), gates=gates, **options).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for gate in model.ranked_gates:
            gate.score.copy_(torch.rand(gate.num_heads))
            if isinstance(gate, RankedHeads):
                gate.scorer.weight.normal_()
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_the_first_step_is_the_originals_and_it_goes_back_to_plain(kind: str, training: bool, tmp_path: Path) -> None:
    original = tiny(kind).train(training)
    before = {name: weight.clone() for name, weight in original.state_dict().items()}
    ids, mask = ragged()
    with torch.no_grad():
        expected = original(ids, attention_mask=mask).logits
        model = retrofit(original, gates=ORDER)
        output = model(ids, mask, labels=LABELS)
    torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=1e-5)
    assert all(a.groups.shape == (5, 3) and a.groups.all() for a in output.allocations)
    assert model.order.unique().numel() == LAYERS * (HEADS + 3)
    model.save_pretrained(tmp_path)
    after = Model.from_pretrained(tmp_path).plain().state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("budget", ["mean:0.5", "fixed:0.25", "max:0.4", "mean:0", "full", "random"])
@pytest.mark.parametrize("gates", [ORDER, RANKED], ids=["order", "ranked"])
@pytest.mark.parametrize("kind", KINDS)
def test_running_some_groups_equals_the_definition(kind: str, gates: dict[str, Any], budget: str) -> None:
    model, (ids, mask) = shuffled(kind, gates), ragged()
    model.config.training_progress = 1.0
    ran: list[int] = []

    def definition(self: BudgetedFeedForward, x: torch.Tensor, _: Any, active: torch.Tensor) -> torch.Tensor:
        ran.append(int(active.sum()))
        return self.evaluate(x, active.float())

    with torch.no_grad():
        torch.manual_seed(1)
        with patch.object(feedforward, "costs_on", lambda _: FREE):
            result = model(ids, mask, budget=budget)
        torch.manual_seed(1)
        dense = patch.object(attention, "evaluate_active", lambda *a: None)
        with patch.object(BudgetedFeedForward, "evaluate_active", definition), dense:
            expected = model(ids, mask, budget=budget)
    torch.testing.assert_close(result.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert ran == [int(a.groups.sum()) for a in result.allocations]
    varied = any((a.groups != a.groups[:1]).any() for a in result.allocations)
    assert varied or budget != "random"
    assert varied == (gates is RANKED) or budget != "mean:0.5"
    shares = {"mean:0": 0.0, "full": 1.0}.get(budget, 0.4)
    mean = torch.stack([a.groups for a in result.allocations]).mean().item()
    assert mean == shares if shares in (0, 1) else 0 < mean < 1


@pytest.mark.parametrize("options", [{}, {"renormalize": True}, {"keep_heads": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sorted_units_answer_the_same_from_neighbours(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, (ids, mask) = shuffled(kind, {**ORDER, **options}), ragged()
    blocks: list[tuple[int, int]] = []

    def recorded(self: BudgetedFeedForward, x: torch.Tensor, parts: Any) -> torch.Tensor:
        blocks.extend((part.first, part.last) for part in parts)
        return original(self, x, parts)

    original, budgets = BudgetedFeedForward.evaluate_blocks, ("full", "mean:0.7", "mean:0.3", "fixed:0.5", "mean:0")
    with torch.no_grad():
        before, frozen = [model(ids, mask, budget=budget) for budget in budgets], model.freeze(0.5)(ids, mask).logits
        sort_units(model)
        torch.testing.assert_close(model.freeze(0.5)(ids, mask).logits, frozen, atol=1e-5, rtol=1e-5)
        model.save_pretrained(tmp_path)
        free = patch.object(feedforward, "costs_on", lambda _: FREE)
        with free, patch.object(BudgetedFeedForward, "evaluate_blocks", recorded):
            after = [Model.from_pretrained(tmp_path)(ids, mask, budget=budget) for budget in budgets]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new.logits, old.logits, atol=1e-5, rtol=1e-5)
        for was, now in zip(old.allocations, new.allocations, strict=True):
            assert torch.equal(now.active, was.active.sort(dim=1, descending=True).values)
            assert torch.equal(now.groups, was.groups.sort(dim=1, descending=True).values)
    assert {first for first, _ in blocks} == {0}
    assert {last for _, last in blocks} == {1, 2}
    for gate in model.ranked_gates:
        assert torch.equal(gate.score, gate.score.sort(descending=True).values)


def test_only_one_order_for_all_inputs_is_sorted_and_not_that_of_a_delta() -> None:
    for gates, delta in ((RANKED, False), (ORDER, True)):
        model = shuffled("bert", gates)
        if delta:
            model.keep_base()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        sort_units(model)
        after = model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("budget", ["mean:0.5", "mean:0"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_some_groups_equal_the_definitions(kind: str, budget: str) -> None:
    model, (ids, mask), definition = shuffled(kind), ragged(), BudgetedFeedForward.evaluate
    ran: list[int] = []

    def selective(self: BudgetedFeedForward, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert set(weights.unique().tolist()) <= {0, 1}
        ran.append(int(weights[0].sum()))
        return self.evaluate_active(x, None, weights.bool())

    gradients = []
    for evaluate in (definition, selective):
        model.zero_grad()
        free = patch.object(feedforward, "costs_on", lambda _: FREE)
        with patch.object(BudgetedFeedForward, "evaluate", evaluate), free:
            model(ids, mask, budget=budget, progress=1.0).logits.square().sum().backward()
        # Gates learn from all units, by the definition: the fast path has none of their gradients.
        parameters = {n: p for n, p in model.named_parameters() if ".allocator." not in n}
        gradients.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()})
    assert len(ran) == LAYERS
    assert sum(gradient.any() for gradient in gradients[0].values()) > LAYERS
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-5, rtol=1e-4, msg=name)


def test_gradients_reach_every_parameter_and_a_price_joins_the_loss() -> None:
    model = retrofit(tiny("bert"), gates={**ORDER, "cost_weight": 0.1}).train()
    rank_heads(model, batches(encoded()))
    ids, mask = ragged(batch=32)
    out = model(ids, mask, torch.zeros(32, dtype=torch.long), progress=1.0, teacher_logits=torch.randn(32, 3))
    assert set(out.loss_parts) == {"task", "target", "cost", "distill"}
    out.loss.backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert all(gate.score.grad.abs().sum() > 0 for gate in model.ranked_gates)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert"])
def test_gradient_checkpointing_reaches_the_groups(kind: str) -> None:
    ids, mask = ragged()
    gradients = []
    for checkpointed in (False, True):
        model = shuffled(kind).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(0)
        model(ids, mask, LABELS, progress=1.0).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert"])
def test_a_budget_is_a_share_of_the_cost_that_is_counted(kind: str) -> None:
    model, data = shuffled(kind), encoded(6).select(np.array([0]))
    D, inner, n = 32, 48, int(data.lengths[0])
    model.config.gates["price_tokens"] = n
    prices, layer = model.prices, 8 * n * D * D + 4 * n * n * D + (6 if kind == "modernbert" else 4) * n * D * inner
    assert len(prices) == LAYERS * (HEADS + 3)
    assert prices.sum().item() == pytest.approx(LAYERS)
    assert prices[0].item() == pytest.approx((8 * n * D * D + 4 * n * n * D) / HEADS / layer)
    scores = score(TorchEngine(model), data, "mean:0.5")
    result = summarize(scores, model.config.spec, split="test", dial="mean:0.5")
    full = summarize(score(TorchEngine(model), data, "full"), model.config.spec, split="test", dial="full")
    saved = (full.cost["flops_per_text"] - result.cost["flops_per_text"]) / layer
    assert 0.4999 * LAYERS <= saved <= 0.5001 * LAYERS + prices.max().item()
    assert result.budget["groups"] == 3
    assert result.budget["groups_run"] == pytest.approx(scores.groups.mean() / 3)
    frozen = model.freeze(0.5)
    again = summarize(score(TorchEngine(frozen), data), frozen.config.spec, split="test", dial="learned")
    assert again.cost["flops_per_text"] == pytest.approx(result.cost["flops_per_text"])


def test_prices_may_be_set() -> None:
    model = retrofit(tiny("bert"), gates={**ORDER, "groups_price": 0.25})
    heads, groups = LAYERS * HEADS, LAYERS * 3
    torch.testing.assert_close(model.prices, torch.tensor([0.75 / HEADS] * heads + [0.25 / 3] * groups))


def test_all_heads_run_while_groups_are_left_out() -> None:
    model = retrofit(tiny("bert"), gates={**ORDER, "keep_heads": True, "groups_price": 0.5})
    assert all(a.active.all() for a in model.eval()(*ragged(), budget="mean:0.75").allocations)  # before it is ranked
    rank_heads(model, batches(encoded()))
    assert [gate.score.requires_grad for gate in model.ranked_gates] == [False] * LAYERS + [True] * LAYERS
    ids, mask = ragged()
    executed = {}
    for share in (0.75, 0.5, 0.25):
        with torch.no_grad():
            allocations = model.eval()(ids, mask, budget=f"mean:{share}").allocations
        executed[share] = [int(sum(a.heads[0] for a in allocations)), int(sum(a.groups[0].sum() for a in allocations))]
    every = LAYERS * HEADS
    assert executed == {0.75: [every, LAYERS * 3 // 2], 0.5: [every, 0], 0.25: [every // 2, 0]}


def test_flops_of_groups_by_hand() -> None:
    shape = Shape(layers=2, heads=4, width=8, inner=16, labels=3, groups=4, budget_net=False, scorer=False)
    every = count(shape, 5, [4, 4], groups=[4, 4])
    assert every.feedforward == 2 * 4 * 5 * 8 * 16
    assert count(shape, 5, [4, 4], groups=[1, 2]).feedforward == every.feedforward * 3 / 8
    assert count(shape, 5, [4, 4], groups=[1, 2], execution="dense").feedforward == every.feedforward
    assert count(shape, 5, [4, 4]).feedforward == every.feedforward


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert"])
def test_neurons_are_sorted_by_the_gradient_by_their_weight(kind: str) -> None:
    model, data = retrofit(tiny(kind), gates=ORDER).eval(), batches(encoded(6))

    def losses() -> torch.Tensor:
        with torch.no_grad():
            logits = [model(b["input_ids"], b["attention_mask"], budget="full").logits for b in data]
            labels = torch.cat([b["labels"] for b in data])
            return torch.nn.functional.cross_entropy(torch.cat(logits), labels, reduction="none")

    before = losses()
    importance = rank_heads(model, data)
    torch.testing.assert_close(losses(), before, atol=1e-5, rtol=1e-5)
    assert [len(units) for units in importance] == [HEADS] * LAYERS + [3] * LAYERS
    outer, slopes = model.feedforwards[0].outer.weight, []
    for column in range(model.config.neurons):  # what a small change of each neuron does
        weights, changed = outer.data[:, column].clone(), []
        for step in (1e-2, -1e-2):
            outer.data[:, column] = weights * (1 + step)
            changed.append(losses())
        outer.data[:, column] = weights
        slopes.append((changed[0] - changed[1]) / 2e-2)
    by_neuron = torch.stack(slopes)
    sizes = by_neuron.abs().sum(dim=1)
    assert (sizes[1:] <= sizes[:-1] + 2e-2 * sizes[0]).all()
    groups = by_neuron.unflatten(0, (3, -1)).sum(dim=1).abs().sum(dim=1)
    first = importance[LAYERS]
    torch.testing.assert_close(first / first.norm(), groups / groups.norm(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [0.4, 0.0])
def test_a_frozen_model_has_the_units_of_its_budget_alone(kind: str, budget: float, tmp_path: Path) -> None:
    model = shuffled(kind, exits={"layers": [1, 2], "words": False})
    for head in model.stages.heads:
        torch.nn.init.normal_(head.outer.weight)
    model.freeze(budget).save_pretrained(tmp_path)
    again, (ids, mask) = Model.from_pretrained(tmp_path).eval(), ragged()
    with torch.no_grad():
        expected, result = model(ids, mask, budget=f"mean:{budget}"), again(ids, mask, budget="exit:0")
    torch.testing.assert_close(result.stage_logits, expected.stage_logits, atol=1e-5, rtol=1e-5)
    widths = np.array([len(groups) for groups in again.config.gates["groups"]])
    rows = [len(part.inner.weight) // part.parts // 16 for part in again.feedforwards]
    assert rows == widths.tolist() == [int(a.groups[0].sum()) for a in expected.allocations]
    again.config.exits.update(rule=[[0.0, -1.0]] * 2, limit=1.0)
    scores = score(TorchEngine(again), encoded(12), "exit:0.9")
    ran = np.arange(LAYERS) < np.array([1, 2, 3])[scores.exits][:, None]
    assert (scores.groups == widths * ran).all()


def test_a_deltas_neurons_stay_where_they_are(tmp_path: Path) -> None:
    tiny("bert").save_pretrained(tmp_path / "base")
    base, fresh = load_base(str(tmp_path / "base"))
    model = retrofit(base, base_name=str(tmp_path / "base"), base_sha256=base_hash(base, fresh), gates=ORDER)
    model.keep_base(fresh)
    rank_heads(model, batches(encoded()))
    model.save_pretrained(tmp_path / "delta")
    ids, mask = ragged()
    again = Model.from_pretrained(tmp_path / "delta")
    with torch.no_grad():
        expected = model.eval()(ids, mask, budget="mean:0.5").logits
        torch.testing.assert_close(again(ids, mask, budget="mean:0.5").logits, expected)


def test_thresholds_of_chosen_groups_execute_what_was_asked_for() -> None:
    model, data = shuffled("bert", RANKED), encoded(64)
    calibrate_thresholds(model, batches(data))
    prices, paid = model.prices.numpy(), cumulative_prices(model.order, model.prices)
    for units, _ in model.config.gates["threshold_offsets"]:
        share = paid[units - 1].item()
        out = score(TorchEngine(model), data, f"mean:{share}")
        executed = prices[0] * out.heads.sum(1) + prices[-1] * out.groups.sum(1)
        assert executed.mean() / LAYERS == pytest.approx(share, abs=0.03)
        assert len(set(out.groups.sum(1).tolist())) > 1  # texts differ


@pytest.mark.parametrize(("neurons", "size"), [(3072, 64), (1152, 64), (512, 64), (48, 6), (100, 10), (7, 1)])
def test_the_size_of_groups_divides_any_layer(neurons: int, size: int) -> None:
    base, gates = tiny("bert", intermediate_size=neurons).config, {**ORDER, "group_size": "auto"}
    config = BudgetFormerConfig.over(base, gates=gates)
    assert config.gates["group_size"] == size
    assert config.groups * size == neurons


def test_wrong_groups_are_named() -> None:
    with pytest.raises(UsageError, match=r"group_size=7 with 48 feed-forward neurons: give a size that divides them"):
        retrofit(tiny("bert"), gates={"kind": "order", "group_size": 7})
    for options in ({"keep_heads": True}, {"groups_price": 0.5}):
        with pytest.raises(UsageError, match="are about groups of neurons: give group_size, such as 64"):
            retrofit(tiny("bert"), gates={"kind": "order", **options})
    for price in (0.0, 1.0):
        with pytest.raises(UsageError, match=f"groups_price={price}: give a number between 0 and 1"):
            retrofit(tiny("bert"), gates={**ORDER, "groups_price": price})
