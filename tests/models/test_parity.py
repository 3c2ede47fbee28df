"""At first a retrofitted encoder computes what the original did; selective execution equals the definition."""

from __future__ import annotations

import copy
from unittest.mock import patch

import pytest
import torch

from budgetformer.models.model import BudgetFormerForSequenceClassification as Model
from budgetformer.models.model import retrofit
from budgetformer.nn import selective
from budgetformer.nn.selective import Costs
from tests.models.tiny import HEADS, KINDS, LAYERS, ragged, tiny


@pytest.mark.parametrize("gates", ["ranked", "order", "learned", "all"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_the_first_step_is_the_originals(kind: str, gates: str, training: bool) -> None:
    original = tiny(kind).train(training)
    ids, mask = ragged()
    with torch.no_grad():
        expected = original(ids, attention_mask=mask).logits
    model = retrofit(original, gates={"kind": gates})
    assert model.training == training
    with torch.no_grad():
        output = model(ids, mask, labels=torch.tensor([0, 1, 2, 0, 1]))
    torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=1e-5)
    assert all(a.active.all() for a in output.allocations)
    assert len(output.allocations) == LAYERS
    assert output.loss.isfinite()


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_padding_on_the_left_and_mean_pooling(kind: str) -> None:
    original = tiny(kind, **({"classifier_pooling": "mean"} if kind == "modernbert" else {}))
    ids, mask = ragged()
    if kind == "modernbert":
        ids, mask = ids.flip(1), mask.flip(1)
    with torch.no_grad():
        expected = original(ids, attention_mask=mask).logits
        torch.testing.assert_close(retrofit(original)(ids, mask).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", ["blocks", "pairs"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@pytest.mark.parametrize("budget", ["mean:0.5", "fixed:0.25", "max:0.4", "mean:0", "full", "random"])
def test_selective_execution_equals_the_definition(kind: str, budget: str, way: str) -> None:
    model = retrofit(tiny(kind)).eval()
    model.config.training_progress = 1.0
    with torch.no_grad():
        for gate in model.ranked_gates:
            gate.score.copy_(torch.rand(HEADS))
            gate.scorer.weight.normal_(std=0.05)
    ids, mask = ragged()
    cheap = Costs(block=0.0, run=0.0, move=0.0) if way == "blocks" else Costs(block=0.0, run=1e12, move=0.0)
    with torch.no_grad():
        torch.manual_seed(1)
        with patch.object(selective, "cheapest", lambda *a: "dense"):
            expected = model(ids, mask, budget=budget)
        torch.manual_seed(1)
        with patch.object(selective, "_CPU", cheap), patch.object(selective, "cheapest", lambda *a: way):
            result = model(ids, mask, budget=budget)
    torch.testing.assert_close(result.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert all((a.active == b.active).all() for a, b in zip(result.allocations, expected.allocations, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_whole_models_save_reload_and_go_back_to_plain(kind: str, tmp_path) -> None:
    original = tiny(kind)
    before = copy.deepcopy(original.state_dict())
    model = retrofit(original)
    ids, mask = ragged()
    model.save_pretrained(tmp_path)
    again = Model.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids, mask).logits, model(ids, mask).logits)
    after = again.plain().state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_the_papers_gates_reload_too(tmp_path) -> None:
    model = retrofit(tiny("bert"), gates={"kind": "learned"})
    model.save_pretrained(tmp_path)
    ids, mask = ragged()
    with torch.no_grad():
        assert torch.equal(Model.from_pretrained(tmp_path)(ids, mask).logits, model(ids, mask).logits)


def test_attention_maps_can_be_asked_for() -> None:
    for kind in ("bert", "modernbert"):
        original = tiny(kind, attn_implementation="eager")
        ids, mask = ragged()
        with torch.no_grad():
            expected = original(ids, attention_mask=mask, output_attentions=True).attentions
            maps = retrofit(original)(ids, mask, output_attentions=True).attentions
        real = mask[:, None, :, None].bool()
        for layer, result in maps.items():
            torch.testing.assert_close(result * real, expected[layer] * real, atol=1e-5, rtol=1e-5)
