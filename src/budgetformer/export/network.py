"""The network of nn/ as an ONNX graph in which heads that are not chosen are not computed.

Shapes: B samples, N tokens, D model width, H heads, d = D / H; P active (sample, head) pairs, ordered by head.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from budgetformer.dial import Dial
from budgetformer.errors import ModelError, UsageError
from budgetformer.export.builder import BOOL, DOUBLE, FLOAT, INT64, Graph, Parts
from budgetformer.models.model import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.models.stages import ExitHead
from budgetformer.nn.allocation import ROUNDING_SLACK, GatedHeads, LearnedHeads, Selection, StaticHeads
from budgetformer.nn.attention import BudgetedAttention
from budgetformer.nn.encoder import Block, Embedding

if TYPE_CHECKING:
    from onnx import ModelProto

GATE, EXIT = "gate", "exit"  # in the names of the nodes that decide: they stay in full precision
# From where on all heads at once are quicker than the chosen ones one by one, as a share of all pairs: (3, 4) is 3/4.
_DENSE_ABOVE = (3, 4)


class Padding(NamedTuple):
    """What the graph knows of padding: each real token's share in a mean, and what to add to scores."""

    share: str  # (B, 1, N)
    bias: str  # (B, 1, N)

    @classmethod
    def of(cls, g: Graph, mask_BN: str) -> Padding:
        real_B1N = g("Unsqueeze", g("Cast", mask_BN, to=FLOAT), g.ints(1))
        share = g("Div", real_B1N, g("ReduceSum", real_B1N, g.ints(2)))
        lowest = _one(g, float(np.finfo(np.float32).min))
        return cls(share, g("Where", g("Cast", real_B1N, to=BOOL), _one(g, 0.0), lowest))


class Gates(NamedTuple):
    """Which heads of which samples run, and what their outputs are multiplied by."""

    active: str  # (B, H)
    weights: str  # (B, H)


def build(model: BudgetFormerForSequenceClassification, dial: Dial, *, separate: bool = False) -> ModelProto:
    """The graph: input_ids, attention_mask (and token_type_ids, budget_max) -> hidden states, logits, heads by depth.

    Logits are what a stage adds to those of the stages before. `separate` gives each head's weights a tensor of their
    own, which a quantiser needs.
    """
    config, dial = model.config, dial.heads
    check(config, dial)
    g = Graph(separate=separate)
    ids = g.input("input_ids", INT64, ["batch", "length"])
    mask = g.input("attention_mask", INT64, ["batch", "length"])
    padding = Padding.of(g, mask)
    types = g.input("token_type_ids", INT64, ["batch", "length"]) if config.segment_embeddings else None
    most = None
    if config.gate.selects:
        most = _most_heads(g, config.num_attention_heads, config.part(Selection).min_heads, dial)
    exits = dict(zip([depth for depth in config.stages.depths[:-1] if depth], model.stages.heads, strict=True))
    with g.part("embedding"):
        x = _embedding(g, ids, types, model.base.encoder.embedding)
    heads: list[str] = []
    for depth, block in enumerate(model.base.encoder.blocks, 1):
        with g.part(f"layer.{depth - 1}"):
            x, count = _block(g, x, padding, block, config.training_progress, dial, most)
            heads.append(count)
        if depth in exits or depth == config.num_hidden_layers:
            with g.part(EXIT):
                if depth in exits:
                    x = g.output(f"hidden_{depth}", x, FLOAT, ["batch", "length", config.hidden_size])
                    logits = _exit(g, x, mask, padding, exits[depth])
                else:
                    pooled = _pooled(g, x, padding) if config.pooling == "mean" else _first_token(g, x, mask)
                    logits = _linear(g, pooled, model.base.classifier)
            g.output(f"logits_{depth}", logits, FLOAT, ["batch", config.labels])
            g.output(f"heads_{depth}", g("Concat", *heads, axis=1), INT64, ["batch", len(heads)])
            heads = []
    return g.finish()


def check(config: BudgetFormerConfig, dial: Dial) -> None:
    """Refuse what a graph cannot hold."""
    if not config.gate.exportable:
        raise ModelError(
            f"gates of the kind {config.kind!r} draw their heads anew at every call, which a graph cannot repeat: "
            "export a model with gates of another kind"
        )
    if dial.mode == "random":
        raise UsageError("budget 'random' cannot be exported: give learned, full, fixed:X, max:X or override:X")


def _array(tensor: Tensor) -> NDArray[np.float32]:
    out: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return out


def _one(g: Graph, value: float) -> str:
    kind = np.int64 if isinstance(value, int) else np.float32
    return g.constant(np.array(value, kind))


def _linear(g: Graph, x: str, layer: nn.Linear) -> str:
    return g.linear(x, _array(layer.weight).T, _array(layer.bias))


def _norm(g: Graph, x: str, layer: nn.LayerNorm) -> str:
    weight, bias = g.constant(_array(layer.weight)), g.constant(_array(layer.bias))
    return g("LayerNormalization", x, weight, bias, axis=-1, epsilon=layer.eps)


def _pooled(g: Graph, x: str, padding: Padding | None) -> str:
    """The mean over real tokens, or over all places where there is no padding to heed. -> (B, D)."""
    if padding is None:
        return g("ReduceMean", x, g.ints(1), keepdims=0)
    return g("Squeeze", g("MatMul", padding.share, x), g.ints(1))


def _first_token(g: Graph, x: str, mask_BN: str) -> str:
    """The state of the first real token. -> (B, D)."""
    return g("GatherND", x, g("ArgMax", mask_BN, axis=1), batch_dims=1)


def _exit(g: Graph, x: str, mask_BN: str, padding: Padding, head: nn.Module) -> str:
    """What an ExitHead adds to the answer so far. -> (B, C)."""
    assert isinstance(head, ExitHead)
    pooled = g("Concat", _first_token(g, x, mask_BN), _pooled(g, x, padding), axis=1)
    return _linear(g, g("Gelu", _linear(g, _norm(g, pooled, head.norm), head.inner)), head.outer)


def _embedding(g: Graph, ids: str, types: str | None, layer: Embedding) -> str:
    x = g("Gather", g.constant(_array(layer.tokens.weight * layer.scale)), ids)
    length = g("Shape", ids, start=1, end=2)
    x = g("Add", x, g("Slice", g.constant(_array(layer.positions)), g.ints(0), length))
    if layer.segments is not None:
        assert types is not None
        x = g("Add", x, g("Gather", g.constant(_array(layer.segments.weight)), types))
    return x


def _block(
    g: Graph, x: str, padding: Padding, block: Block, progress: float, dial: Dial, most: str | None
) -> tuple[str, str]:
    """One layer. -> hidden states (B, N, D), number of heads that ran (B, 1)."""
    allocator, gates = block.attention.allocator, None
    if isinstance(allocator, GatedHeads):
        assert most is not None
        with g.part(GATE):
            gates = _gates(g, x, padding, allocator, progress, dial, most)
    with g.part("attention"):
        y = attention(g, x, padding, gates, block.attention)
        if gates is None:
            shape = g("Concat", g("Shape", x, start=0, end=1), g.ints(1), axis=0)
            count = g("Expand", g.ints(allocator.num_heads), shape)
        else:
            count = g("ReduceSum", g("Cast", gates.active, to=INT64), g.ints(1))
    x = _norm(g, g("Add", x, y), block.attention_norm)
    with g.part("feedforward"):
        act = {torch.nn.functional.relu: "Relu", torch.nn.functional.gelu: "Gelu"}[block.activation]
        y = _linear(g, g(act, _linear(g, x, block.inner)), block.outer)
        return _norm(g, g("Add", x, y), block.feedforward_norm), count


def _most_heads(g: Graph, num_heads: int, min_heads: int, dial: Dial) -> str:
    """The most heads that may run, by the input `budget_max`: the dial max:X, to be turned at run time."""
    default = dial.value if dial.mode == "max" else 1.0
    value = g.input("budget_max", DOUBLE, [], np.array(default, np.float64))
    scale, slack = (g.constant(np.array(number, np.float64)) for number in (num_heads, ROUNDING_SLACK))
    count = g("Cast", g("Floor", g("Add", g("Mul", value, scale), slack)), to=INT64)
    return g("Clip", count, _one(g, min_heads), _one(g, num_heads))


def _gates(g: Graph, x: str, padding: Padding, allocator: GatedHeads, progress: float, dial: Dial, most: str) -> Gates:
    """As `GatedHeads` and `allocate` at evaluation."""
    selection, H = allocator.selection, allocator.num_heads
    pooled = _pooled(g, x, None if selection.pool_padding else padding)
    budget_B1, heads_B1 = _budget(g, pooled, allocator, dial)
    relevance = _relevance(g, pooled, x, allocator, progress)
    order = g.several("TopK", 2, relevance, g.ints(H), largest=1)[1]  # of equals, the lower index comes first
    ranks = g.several("TopK", 2, order, g.ints(H), largest=0)[1]  # the inverse of a permutation
    active = g("Less", ranks, g("Min", heads_B1, most))
    ones = g("Cast", active, to=FLOAT)
    chosen = g("Mul", relevance, ones)
    total = g("ReduceSum", chosen, g.ints(1))
    some = g("Where", g("Greater", total, _one(g, 0.0)), total, _one(g, 1.0))
    if selection.budget_as == "count":
        return Gates(active, g("Div", g("Mul", g("ReduceSum", ones, g.ints(1)), chosen), some))
    weights = g("Mul", g("Mul", budget_B1, _one(g, float(H))), chosen)
    return Gates(active, g("Div", weights, some) if selection.renormalize else weights)


def _budget(g: Graph, pooled: str, allocator: GatedHeads, dial: Dial) -> tuple[str, str]:
    """s and the number of heads that the dial makes of it, both (B, 1) or (1, 1)."""
    selection, H = allocator.selection, allocator.num_heads
    if isinstance(allocator, LearnedHeads) and dial.mode != "override":
        first, last = (layer for layer in allocator.budget_net if isinstance(layer, nn.Linear))
        budget = g("Sigmoid", _linear(g, g("Relu", _linear(g, pooled, first)), last))
        rounding = {"floor": "Floor", "round": "Round", "ceil": "Ceil"}[selection.rounding]
        sH = g("Mul", budget, _one(g, float(H)))
        sH = g("Add", sH, _one(g, selection.slack)) if selection.slack else sH
        heads = g("Cast", g(rounding, sH), to=INT64)
        heads = g("Clip", heads, _one(g, selection.min_heads), _one(g, H))
    else:  # the same for every input
        s = torch.full((1,), dial.value or 0.0) if dial.mode == "override" else allocator.budget(torch.zeros(1, 1))
        budget = g.constant(_array(s[:, None]))
        heads = g.ints(int(selection.count(s, H)))
    if dial.mode in ("full", "fixed"):
        heads = g.ints(int(selection.apply_budget(torch.tensor(0), dial, H)))
    return budget, heads


def _relevance(g: Graph, pooled: str, x: str, allocator: GatedHeads, progress: float) -> str:
    temperature = allocator.exploration.temperature(progress)
    if isinstance(allocator, StaticHeads):
        relevance = (allocator.scores(torch.zeros(1, 1)) / temperature).softmax(-1)
        shape = g("Concat", g("Shape", x, start=0, end=1), g.ints(allocator.num_heads), axis=0)
        return g("Expand", g.constant(_array(relevance)), shape)
    return g("Softmax", g("Div", _linear(g, pooled, allocator.scorer), _one(g, temperature)), axis=-1)


def attention(g: Graph, x: str, padding: Padding, gates: Gates | None, layer: BudgetedAttention) -> str:
    """Dense where there are no gates or nearly all heads run, else the active pairs alone. -> (B, N, D)."""
    weights = _Weights.of(g, layer)
    if gates is None:
        return _all_heads(g, x, padding, None, weights)
    pairs = g("ReduceSum", g("Cast", gates.active, to=INT64), keepdims=0)
    numerator, denominator = (_one(g, number) for number in _DENSE_ABOVE)
    nearly_all = g("Greater", g("Mul", pairs, denominator), g("Mul", g("Size", gates.active), numerator))
    dense, chosen = partial(_all_heads, weights_BH=gates.weights), partial(_chosen_heads, gates=gates)
    return g.choose(nearly_all, *(partial(branch, g, x, padding, weights=weights) for branch in (dense, chosen)))


class _Weights(NamedTuple):
    """An attention layer's tensors, whole and by head: the columns of Q, K and V of one head stand together."""

    num_heads: int
    into: Parts  # (D, H * 3 d), Q divided by sqrt(d); by head (D, 3 d)
    into_bias: Parts
    back: Parts  # (D, D); by head (d, D)
    back_bias: str

    @classmethod
    def of(cls, g: Graph, layer: BudgetedAttention) -> _Weights:
        H, D = layer.num_heads, layer.qkv.in_features
        d = D // H
        scale_3D = np.tile(np.repeat(np.array([d**-0.5, 1, 1], np.float32), d), H)
        into = g.parts(_array(layer.qkv.weight).T * scale_3D, H, 1)
        into_bias = g.parts(_array(layer.qkv.bias) * scale_3D, H, 0)
        back = g.parts(_array(layer.out.weight).T, H, 0)
        return cls(H, into, into_bias, back, back_bias=g.constant(_array(layer.out.bias)))


def _attend(g: Graph, qkv: str, bias: str, order: list[int]) -> str:
    """Softmax(Q K^T) V, Q divided by sqrt(d) already; `order` swaps the last two axes."""
    q, k, v = g.split(qkv, 3, -1)
    scores = g("Add", g("MatMul", q, g("Transpose", k, perm=order)), bias)
    return g("MatMul", g("Softmax", scores, axis=-1), v)


def _all_heads(g: Graph, x: str, padding: Padding, weights_BH: str | None, weights: _Weights) -> str:
    """The definition: every head, then multiplied by its weight."""
    H = weights.num_heads
    qkv = g("Reshape", g("Add", g("MatMul", x, weights.into.all), weights.into_bias.all), g.ints(0, 0, H, -1))
    o_BHNd = _attend(g, g("Transpose", qkv, perm=[0, 2, 1, 3]), g("Unsqueeze", padding.bias, g.ints(1)), [0, 1, 3, 2])
    if weights_BH is not None:
        o_BHNd = g("Mul", o_BHNd, g("Unsqueeze", weights_BH, g.ints(2, 3)))
    o_BND = g("Reshape", g("Transpose", o_BHNd, perm=[0, 2, 1, 3]), g("Shape", x))
    return g("Add", g("MatMul", o_BND, weights.back.all), weights.back_bias)


def _chosen_heads(g: Graph, x: str, padding: Padding, gates: Gates, weights: _Weights) -> str:
    """Each head's projections for the samples that use it, attention over all pairs at once, a sum by sample."""
    H = weights.num_heads
    active_HB = g("Transpose", gates.active, perm=[1, 0])
    pairs_2P = g("NonZero", active_HB)
    users_H = g("ReduceSum", g("Cast", active_HB, to=INT64), g.ints(1), keepdims=0)
    sample_P = g("Gather", pairs_2P, _one(g, 1), axis=0)
    x_nND = g.several("Split", H, g("Gather", x, sample_P), users_H, axis=0)
    qkv_nNC = [
        g("Add", g("MatMul", x, weight), bias)
        for x, weight, bias in zip(x_nND, weights.into.by_head, weights.into_bias.by_head, strict=True)
    ]
    bias_P1N = g("Gather", padding.bias, sample_P)
    o_PNd = _attend(g, g("Concat", *qkv_nNC, axis=0), bias_P1N, [0, 2, 1])
    weights_HB = g("Transpose", gates.weights, perm=[1, 0])
    weights_P = g("GatherND", weights_HB, g("Transpose", pairs_2P, perm=[1, 0]))
    o_PNd = g("Mul", o_PNd, g("Unsqueeze", weights_P, g.ints(1, 2)))
    o_nNd = g.several("Split", H, o_PNd, users_H, axis=0)
    samples_n1 = g.several("Split", H, g("Unsqueeze", sample_P, g.ints(1)), users_H, axis=0)
    y = g("Expand", weights.back_bias, g("Shape", x))
    # Head by head, so that no sample occurs twice in one ScatterND: its threads add without locks, and sums get lost.
    for o_Nd, samples, weight in zip(o_nNd, samples_n1, weights.back.by_head, strict=True):
        y = g("ScatterND", y, samples, g("MatMul", o_Nd, weight), reduction="add")
    return y
