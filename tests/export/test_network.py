"""The graph says what the model says, for every option, and does not touch heads that nobody chose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gates import sorted_options

from budgetformer.dial import Dial
from budgetformer.engine.onnx import session
from budgetformer.errors import ModelError, UsageError
from budgetformer.export.cut import all_nodes
from budgetformer.export.network import build
from budgetformer.models.model import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.nn.allocation import LearnedHeads

VOCAB, POSITIONS = 30, 12
OPTIONS = st.fixed_dictionaries({
    "num_attention_heads": st.sampled_from([1, 2, 4]),
    "kind": st.sampled_from(["learned", "learned", "fixed", "static", "all"]),
    "budget_as": st.sampled_from(["gain", "count"]),
    "renormalize": st.booleans(),
    "rounding": st.sampled_from(["floor", "round", "ceil"]),
    "min_heads": st.integers(0, 1),
    "pool_padding": st.booleans(),
    "pooling": st.sampled_from(["mean", "first"]),
    "hidden_act": st.sampled_from(["relu", "gelu"]),
    "scale_embeddings": st.booleans(),
    "segment_embeddings": st.booleans(),
    "training_progress": st.floats(0, 1),
})  # fmt: skip
DIALS = st.sampled_from(["learned", "learned", "full", "fixed:0.25", "fixed:0", "max:0.5", "override:0.6"])


def make_model(**options: Any) -> BudgetFormerForSequenceClassification:
    """A small model with weights far from zero, so that texts differ in their heads."""
    options = {"num_attention_heads": 4, "fixed_budget": 0.55, **options}
    config = BudgetFormerConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, intermediate_size=24, num_labels=3,
        max_position_embeddings=POSITIONS, **sorted_options(**options),
    )  # fmt: skip
    model = BudgetFormerForSequenceClassification(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.5)
    return model


def make_batch(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Ragged texts of random tokens; the first fills the batch."""
    lengths = torch.randint(1, length + 1, (batch,))
    lengths[0] = length
    return {
        "input_ids": torch.randint(0, VOCAB, (batch, length)),
        "attention_mask": (torch.arange(length) < lengths[:, None]).long(),
        "token_type_ids": torch.randint(0, 2, (batch, length)),
    }


def both(
    model: BudgetFormerForSequenceClassification,
    batch: dict[str, torch.Tensor],
    dial: str = "learned",
    graph: onnxruntime.InferenceSession | None = None,
    **more: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits and heads of the model, then of the graph."""
    with torch.inference_mode():
        out = model(**batch, budget=dial)
    heads = torch.stack([allocation.active.sum(-1) for allocation in out.allocations], 1)
    graph = graph or session(build(model, Dial.parse(dial)).SerializeToString(), 1)
    known = {node.name for node in graph.get_inputs()}
    feed = {name: value.numpy() for name, value in batch.items() if name in known}
    return out.logits.numpy(), heads.numpy(), *graph.run(None, {**feed, **more})


@settings(max_examples=60)
@given(OPTIONS, DIALS, st.integers(1, 5), st.integers(1, POSITIONS), st.integers(0, 10**6))
def test_every_option_gives_what_the_model_gives(
    options: dict[str, Any], dial: str, batch: int, length: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = make_model(**options)
    logits, heads, ours, ours_heads = both(model, make_batch(batch, length), dial)
    np.testing.assert_array_equal(ours_heads, heads)
    np.testing.assert_allclose(ours, logits, atol=1e-4)


def test_one_batch_holds_every_budget_from_none_to_all() -> None:
    model = make_model(min_heads=0, rounding="round")
    for module in model.modules():
        if isinstance(module, LearnedHeads):
            module.budget_net[2].weight.data *= 20  # type: ignore[operator]
    logits, heads, ours, ours_heads = both(model, make_batch(64, POSITIONS))
    assert {0, 4} < set(heads.flatten().tolist())
    np.testing.assert_array_equal(ours_heads, heads)
    np.testing.assert_allclose(ours, logits, atol=1e-4)


def test_the_graph_is_valid_and_needs_no_extension() -> None:
    graph = build(make_model(segment_embeddings=True), Dial())
    onnx.checker.check_model(graph, full_check=True)
    assert [opset.domain for opset in graph.opset_import] == [""]


@pytest.mark.parametrize("value", [0.0, 0.25, 0.3, 0.5, 0.75, 1.0])
def test_the_dial_turns_at_run_time(value: float) -> None:
    model = make_model()
    graph = session(build(model, Dial()).SerializeToString(), 1)
    batch = make_batch(8, 6)
    logits, heads, ours, ours_heads = both(model, batch, f"max:{value}", graph, budget_max=np.array(value))
    np.testing.assert_array_equal(ours_heads, heads)
    np.testing.assert_allclose(ours, logits, atol=1e-4)


def unpopular(model: BudgetFormerForSequenceClassification, head: int) -> None:
    """Make a head the last that anyone would choose."""
    for module in model.modules():
        if isinstance(module, LearnedHeads):
            module.scorer.weight.data[head] = 0
            module.scorer.bias.data[head] = -1e3


def test_a_head_that_nobody_chose_is_not_even_read() -> None:
    model = make_model()
    unpopular(model, 2)
    batch = make_batch(6, 7)
    clean, _, ours, _ = both(model, batch, "fixed:0.5")
    for block in model.base.encoder.blocks:
        d = block.attention.qkv.in_features // 4
        block.attention.qkv.weight.data[3 * 2 * d : 3 * 3 * d] = float("nan")
        block.attention.out.weight.data[:, 2 * d : 3 * d] = float("nan")
    graph = session(build(model, Dial.parse("fixed:0.5")).SerializeToString(), 1)
    _, _, poisoned, heads = both(model, batch, "fixed:0.5", graph)
    assert (heads == 2).all()
    np.testing.assert_array_equal(poisoned, ours)
    np.testing.assert_allclose(poisoned, clean, atol=1e-4)


@pytest.mark.parametrize("dial", ["fixed:0.25", "fixed:0.5", "full"])
def test_only_the_chosen_pairs_are_projected(dial: str, tmp_path: Path) -> None:
    model, batch = make_model(), make_batch(6, 7)
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    graph = onnxruntime.InferenceSession(build(model, Dial.parse(dial)).SerializeToString(), options)
    _, _, _, heads = both(model, batch, dial, graph)
    events = json.loads(Path(graph.end_profiling()).read_text())
    shapes = [
        next(iter(event["args"]["output_type_shape"][0].values()))
        for event in events
        if event.get("cat") == "Node" and "MatMul" in event["args"].get("op_name", "")
    ]
    by_head = sum(shape[0] for shape in shapes if shape[-1] == 3 * 4)  # Q, K and V of one head for some samples
    complete = sum(shape[0] for shape in shapes if shape[-1] == 3 * 16)
    assert (by_head, complete) == ((0, 2 * 6) if dial == "full" else (heads.sum(), 0))


def test_no_sum_can_be_lost_between_threads() -> None:
    """ONNX Runtime's ScatterND adds without locks: a sample must not occur twice in one of them."""
    made = build(make_model(), Dial())
    scatters = [node for node in all_nodes(made.graph) if node.op_type == "ScatterND"]
    indices = {node.input[1] for node in scatters}
    assert len(scatters) == len(indices) == 2 * 4  # one for each head of each layer, each with its own samples
    splits = {name for node in all_nodes(made.graph) if node.op_type == "Split" for name in node.output}
    assert indices <= splits
    graph = session(made.SerializeToString(), 4)
    model, batch = make_model(), make_batch(64, POSITIONS)
    runs = [both(model, batch, graph=graph)[2] for _ in range(10)]
    assert all(np.array_equal(run, runs[0]) for run in runs)


def test_what_is_drawn_at_random_is_refused() -> None:
    with pytest.raises(ModelError, match="gates of the kind 'random' draw their heads anew"):
        build(make_model(kind="random"), Dial())
    with pytest.raises(UsageError, match="budget 'random' cannot be exported"):
        build(make_model(), Dial.parse("random"))
