"""FLOPs in closed form: by hand, and against torch's own counter on the real model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from budgetformer import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.cost.flops import Shape, count

SHAPE = Shape(layers=2, heads=4, width=8, inner=16, labels=3)


def test_dense_by_hand() -> None:
    # N = 5, D = 8. A layer: projections 4 * 2 * 5 * 64, scores 2 * 2 * 25 * 8, feed-forward 2 * 2 * 5 * 128.
    flops = count(SHAPE, 5, [1, 1], "dense")
    assert flops.projections == 2 * 2560
    assert flops.scores == 2 * 800
    assert flops.feedforward == 2 * 2560
    assert flops.classifier == 2 * 5 * 8 + 2 * 8 * 3  # pooling and one linear layer
    assert flops.gates == 0
    assert flops.total == 5120 + 1600 + 5120 + 128


def test_selective_by_hand() -> None:
    flops = count(SHAPE, 5, [1, 2], "selective")  # 3 of 8 heads
    assert flops.projections == 5120 * 3 / 8
    assert flops.scores == 1600 * 3 / 8
    assert flops.gates == 2 * (2 * 5 * 8 + 2 * 64 + 2 * 8 + 2 * 8 * 4)
    assert flops.attention == flops.projections + flops.scores


def test_the_papers_way_saves_only_the_scores() -> None:
    flops = count(SHAPE, 5, [1, 2], "paper")
    assert flops.projections == 5120
    assert flops.scores == 1600 * 3 / 8


def _sdpa_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """The CPU kernel's missing formula: two products of (N x d) and (d x N)."""
    B, H, N, d = query
    return 2 * 2 * B * H * N * key[2] * d


@pytest.mark.parametrize("kind", ["learned", "all", "static", "random"])
def test_closed_form_equals_torchs_counter(kind: str) -> None:
    config = BudgetFormerConfig.preset("tiny", vocab_size=50, num_labels=3, gates={"kind": kind})
    model = BudgetFormerForSequenceClassification(config).train()  # the definition: every head is computed
    B, N = 3, 11
    mask = torch.ones(B, N)
    mask[0, 7:] = 0  # pooling is a product only where something is padded
    mapping = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, torch.inference_mode():
        model(torch.ones(B, N, dtype=torch.long), mask)
    mode = "dense" if kind == "all" else "paper"
    expected = count(config.spec.shape, N, [4, 4], mode).total
    if kind == "static":
        expected += 2 * 2 * N * 64  # it pools, although nothing reads the result
    assert counter.get_total_flops() == B * expected
