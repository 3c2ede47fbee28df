"""Ranking and calibration take what a DataLoader yields, and leave the model as they found it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from budgetformer.models.importance import calibrate_thresholds, rank_heads
from budgetformer.models.model import retrofit
from tests.models.tiny import VOCAB, ragged, tiny


def batches(kind: type = dict) -> list[Any]:
    torch.manual_seed(0)
    made = []
    for labels in ([0, 1, 2, 0, 1], [2, 2, 0, 1, 1]):
        ids, mask = ragged()
        made.append(kind(input_ids=ids, attention_mask=mask, labels=torch.tensor(labels)))
    return made


def test_batches_are_mappings_or_objects_from_any_iterable() -> None:
    orders = []
    for inputs in (batches(), batches(SimpleNamespace), iter(batches())):
        model = retrofit(tiny("bert"))
        rank_heads(model, inputs)
        calibrate_thresholds(model, iter(batches()))
        orders.append(model.order.detach().clone())
        assert model.config.gates["threshold_offsets"]
    assert torch.equal(orders[0], orders[1])
    assert torch.equal(orders[0], orders[2])


@pytest.mark.parametrize("work", [rank_heads, calibrate_thresholds])
def test_mode_and_gradients_come_back_after_a_failure(work: Any) -> None:
    model = retrofit(tiny("bert"), gates={"learn_order": False}).train()
    wrong = {**batches()[0], "input_ids": torch.full((5, 23), VOCAB)}
    with pytest.raises(ValueError, match="outside the vocabulary"):
        work(model, [*batches(), wrong])
    assert model.training
    assert not any(gate.score.requires_grad for gate in model.ranked_gates)
    assert not any(gate._forward_pre_hooks for gate in model.ranked_gates)


@pytest.mark.parametrize("kind", ["ranked", "order"])
def test_a_fresh_retrofit_executes_the_share_that_it_is_asked_for(kind: str) -> None:
    shape = {"num_hidden_layers": 6, "num_attention_heads": 12, "hidden_size": 48}
    model = retrofit(tiny("bert", **shape), gates={"kind": kind}).eval()
    assert model.order.unique().numel() == 72
    ids, mask = ragged()
    for share in (0.05, 0.3, 0.5):
        with torch.no_grad():
            active = torch.stack([a.active for a in model(ids, mask, budget=f"mean:{share}").allocations])
        assert active.float().mean().item() == pytest.approx(share, abs=1 / 72)
    assert sum(map(len, model.freeze(0.3).config.gates["heads"])) == 21
