"""How fast heads are that do not run, in ONNX Runtime: the exported graph against the dense model's graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from budgetformer.bench import Row, model_config, random_heads
from budgetformer.cost.flops import Shape, count
from budgetformer.cost.timing import take_turns
from budgetformer.engine.onnx import session
from budgetformer.export.builder import BOOL, FLOAT, INT64, Graph
from budgetformer.export.network import Gates, Padding, attention, build
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.nn.allocation import AllHeads, Dial, LearnedHeads
from budgetformer.nn.attention import BudgetedAttention

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


@dataclass(frozen=True)
class OnnxRow(Row):
    """A comparison of two graphs in one runtime."""

    engine: str = "onnx"


def attention_rows(shape: Shape, batches: Iterable[int], lengths: Iterable[int], ks: Iterable[int]) -> Iterable[Row]:
    """The attention block, projections included and gates excluded, against the dense block."""
    torch.manual_seed(0)
    layer = BudgetedAttention(shape.width, AllHeads(shape.heads))
    dense, budgeted = (_block(layer, gated) for gated in (False, True))
    for batch in batches:
        for length in lengths:
            x = np.random.default_rng(0).standard_normal((batch, length, shape.width), np.float32)
            feed = {"x": x, "attention_mask": np.ones((batch, length), np.int64)}
            for k in ks:
                active = random_heads(batch, shape.heads, k)
                gates = {"active": active.numpy(), "weights": active.float().numpy()}
                ms = take_turns(
                    {
                        "dense": partial(dense.run, None, feed),
                        "selective": partial(budgeted.run, None, {**feed, **gates}),
                    },
                    seconds=1.5,
                    most=100,
                )
                yield _row("attention", batch, length, shape, k, ms, shape.heads / k)


def model_rows(shape: Shape, batches: Iterable[int], lengths: Iterable[int], ks: Iterable[int]) -> Iterable[Row]:
    """The whole model, gates included, whose random scorers choose k heads for each sample, against the dense model."""
    torch.manual_seed(0)
    dense, budgeted = (_model(shape, kind) for kind in ("all", "learned"))
    for batch in batches:
        for length in lengths:
            ids = np.random.default_rng(0).integers(1, shape.vocab, (batch, length))
            feed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            for k in ks:
                dialled = {**feed, "budget_max": np.array(k / shape.heads)}
                ms = take_turns(
                    {"dense": partial(dense.run, None, feed), "selective": partial(budgeted.run, None, dialled)},
                    seconds=4.0,
                    most=40,
                )
                ideal = count(shape, length, [], "dense").total / count(shape, length, [k] * shape.layers).total
                yield _row("model", batch, length, shape, k, ms, ideal)


def _row(what: str, batch: int, length: int, shape: Shape, k: int, ms: dict[str, float], ideal: float) -> Row:
    dense, ours = ms["dense"], ms["selective"]
    return OnnxRow(what, batch, length, shape.heads, k, dense, ours, dense / ours, ideal, {"dense": dense})


def _block(layer: BudgetedAttention, gated: bool) -> InferenceSession:
    H, D = layer.num_heads, layer.qkv.in_features
    g = Graph()
    x = g.input("x", FLOAT, ["batch", "length", D])
    padding = Padding.of(g, g.input("attention_mask", INT64, ["batch", "length"]))
    gates = Gates(g.input("active", BOOL, ["batch", H]), g.input("weights", FLOAT, ["batch", H])) if gated else None
    g.output("y", attention(g, x, padding, gates, layer), FLOAT, ["batch", "length", D])
    return session(g.finish().SerializeToString(), torch.get_num_threads())


def _model(shape: Shape, kind: str) -> InferenceSession:
    model = BudgetFormerForSequenceClassification(model_config(shape, gates={"kind": kind}))
    for module in model.modules():
        if isinstance(module, LearnedHeads):  # far apart, so that texts differ in the heads that they get
            torch.nn.init.normal_(module.scorer.weight)
    return session(build(model, Dial("full")).SerializeToString(), torch.get_num_threads())
