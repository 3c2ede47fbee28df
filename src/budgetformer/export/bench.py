"""What `bench --what onnx` times: graphs in which heads are chosen, and the dense graphs, in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from budgetformer.engine.onnx import session
from budgetformer.export.builder import BOOL, FLOAT, INT64, Graph
from budgetformer.export.network import Gates, Padding, attention, build
from budgetformer.models.config import BudgetFormerConfig
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.nn.allocation import Dial, LearnedHeads
from budgetformer.nn.attention import BudgetedAttention

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

Calls = dict[str, Callable[[], object]]


def block_calls(layer: BudgetedAttention) -> Callable[[Tensor, Tensor], Calls]:
    """The attention block for hidden states (B, N, D) and active heads (B, H)."""
    dense, budgeted = (_block(layer, gated) for gated in (False, True))

    def prepare(x_BND: Tensor, active_BH: Tensor) -> Calls:
        feed = {"x": x_BND.numpy(), "attention_mask": np.ones(x_BND.shape[:2], np.int64)}
        gates = {"active": active_BH.numpy(), "weights": active_BH.float().numpy()}
        return {"dense": partial(dense.run, None, feed), "selective": partial(budgeted.run, None, {**feed, **gates})}

    return prepare


def model_calls(config: Callable[..., BudgetFormerConfig]) -> Callable[[Tensor, float], Calls]:
    """The whole model for token ids (B, N) and a share of heads, which random scorers choose."""
    dense, budgeted = (_model(config(gates={"kind": kind})) for kind in ("all", "learned"))

    def prepare(ids_BN: Tensor, share: float) -> Calls:
        feed: dict[str, Any] = {"input_ids": ids_BN.numpy(), "attention_mask": np.ones(ids_BN.shape, np.int64)}
        limited = {**feed, "budget_max": np.array(share)}
        return {"dense": partial(dense.run, None, feed), "selective": partial(budgeted.run, None, limited)}

    return prepare


def _block(layer: BudgetedAttention, gated: bool) -> InferenceSession:
    H, D = layer.num_heads, layer.qkv.in_features
    g = Graph()
    x = g.input("x", FLOAT, ["batch", "length", D])
    padding = Padding.of(g, g.input("attention_mask", INT64, ["batch", "length"]))
    gates = Gates(g.input("active", BOOL, ["batch", H]), g.input("weights", FLOAT, ["batch", H])) if gated else None
    g.output("y", attention(g, x, padding, gates, layer), FLOAT, ["batch", "length", D])
    return session(g.finish().SerializeToString(), torch.get_num_threads())


def _model(config: BudgetFormerConfig) -> InferenceSession:
    model = BudgetFormerForSequenceClassification(config)
    for module in model.modules():
        if isinstance(module, LearnedHeads):  # far apart, so that texts differ in the heads that they get
            torch.nn.init.normal_(module.scorer.weight)
    return session(build(model, Dial("full")).SerializeToString(), torch.get_num_threads())
