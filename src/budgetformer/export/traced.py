"""A model as an ONNX graph that torch traces: dense attention with the heads that there are, in one operator each.

Heads that are the same for every text are chosen here and the others are left out. Where they depend on the text all
are computed and weighted: only `network` leaves some out for some texts. Tensors on the way, `hidden_2` and `logits_2`
after layer 2, are outputs: `cut.cut_stages` makes graphs of the stages.

Shapes: B samples, N tokens, D model width, H heads, d = D / H.
"""

from __future__ import annotations

import copy
import warnings
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from budgetformer.dial import Dial
from budgetformer.export.builder import OPSET
from budgetformer.models.layers import Layers, PretrainedLayers
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.models.sites import BiasOnly, Budgets, RetrofitAttention
from budgetformer.models.stages import ExitHead
from budgetformer.nn.allocation import Allocation, Budget, first_token, pool
from budgetformer.nn.attention import BudgetedAttention
from budgetformer.nn.encoder import Block
from budgetformer.nn.selective import Positions

if TYPE_CHECKING:
    from onnx import ModelProto


def same_heads(model: BudgetFormerForSequenceClassification, dial: Dial) -> bool:
    """Whether every text gets the same heads, at the same weights."""
    gate = model.config.gate
    return not gate.per_input or (gate.ranks_layers and dial.heads.mode == "full")


def heads_by_layer(model: BudgetFormerForSequenceClassification, dial: Dial) -> list[int]:
    """How many heads run in each layer where they are the same for every text."""
    return [int(a.active.sum()) for a in _allocations(model, dial)]


def trace(model: BudgetFormerForSequenceClassification, dial: Dial, *, fused: bool = True) -> ModelProto:
    """The graph: input_ids, attention_mask (and token_type_ids) -> hidden states, logits (and heads) by depth.

    `fused` attention is an operator that ONNX Runtime alone has.
    """
    import onnx

    network, file = _Network(model, dial, fused).eval(), BytesIO()
    ids = torch.ones(2, 7, dtype=torch.long)
    names = ["input_ids", "attention_mask", *["token_type_ids"] * model.config.segment_embeddings]
    free = {name: {0: "batch", **({} if "logits" in name or "heads" in name else {1: "length"})}
            for name in (*names, *network.names)}  # fmt: skip
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        # The exporter over torch.export needs another package and 40 times as long for the same operators.
        torch.onnx.export(
            network, (ids,) * len(names), cast("Any", file), dynamo=False, opset_version=OPSET, input_names=names,
            output_names=network.names, dynamic_axes=free,
        )  # fmt: skip
    return _without_aliases(onnx.load_model_from_string(file.getvalue()))


def _without_aliases(model: ModelProto) -> ModelProto:
    """Outputs that are copies of a tensor, such as fp32 cast to fp32, become that tensor: later layers read it."""
    copies = [n for n in model.graph.node if n.op_type in ("Cast", "Identity") and n.output[0].startswith("hidden_")]
    for copied in copies:
        model.graph.node.remove(copied)
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [copied.output[0] if name == copied.input[0] else name for name in names]
    return model


class _Heads(torch.autograd.Function):
    """ONNX Runtime's operator for the attention of all heads at once."""

    @staticmethod
    def symbolic(g: Any, q: Any, k: Any, v: Any, mask: Any, heads: int) -> Any:
        nothing = g.op("prim::Constant")
        nothing.setType(torch._C.OptionalType.ofTensor())
        y = g.op("com.microsoft::MultiHeadAttention", q, k, v, nothing, mask, num_heads_i=heads)
        return y.setType(v.type())

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: int) -> Tensor:
        return torch.zeros_like(v)  # the example's values do not matter


class _FirstToken(torch.autograd.Function):
    """`first_token` in two operators, where tracing its indexing makes fifteen."""

    @staticmethod
    def symbolic(g: Any, hidden_BND: Any, mask_BN: Any) -> Any:
        return g.op("GatherND", hidden_BND, g.op("ArgMax", mask_BN, axis_i=1, keepdims_i=1), batch_dims_i=1)

    @staticmethod
    def forward(ctx: Any, hidden_BND: Tensor, mask_BN: Tensor) -> Tensor:
        return first_token(hidden_BND, mask_BN)


class _Network(nn.Module):
    """The model's layers from the first to the last, and the heads of its exits."""

    def __init__(self, model: BudgetFormerForSequenceClassification, dial: Dial, fused: bool) -> None:
        super().__init__()
        self.config, self.exits, self.base = model.config, model.stages.heads, copy.deepcopy(model.base)
        allocations = _allocations(model, dial) if same_heads(model, dial) else None
        self.dials, _ = model._dials(dial.heads, 1, self.config.training_progress)
        self.attentions: list[_Attention] = []
        for parent in list(self.base.modules()):
            if isinstance(parent, RetrofitAttention | Block):
                name = "core" if isinstance(parent, RetrofitAttention) else "attention"
                fixed = None if allocations is None else allocations[len(self.attentions)]
                self.attentions.append(_Attention(getattr(parent, name), fixed, fused))
                setattr(parent, name, self.attentions[-1])
        depths = [depth for depth in self.config.stages.depths if depth]
        kinds = ["logits", *["heads"] * (allocations is None)]
        self.names = [f"{kind}_{depth}" for depth in depths for kind in ("hidden", *kinds)]
        self.names.remove(f"hidden_{depths[-1]}")
        self.depths = depths

    def forward(self, ids_BN: Tensor, attention_mask: Tensor, segments_BN: Tensor | None = None) -> tuple[Tensor, ...]:
        layers: Layers = self.base if self.config.base is None else PretrainedLayers(self.base)
        mask_BN, outputs = attention_mask.bool(), []
        budgets = Budgets(mask_BN, self.config.training_progress, self.dials)
        hidden_BND, first = layers.embed(ids_BN, segments_BN), 0
        for number, depth in enumerate(self.depths):
            for layer in range(first, depth):
                hidden_BND = layers.run_layer(layer, hidden_BND, budgets)
            if depth < self.depths[-1]:
                head = self.exits[number]
                assert isinstance(head, ExitHead)
                first_BD = _FirstToken.apply(hidden_BND, mask_BN.int())  # type: ignore[no-untyped-call]
                outputs += [hidden_BND, head.classify(first_BD, pool(hidden_BND, mask_BN))]
            else:
                outputs.append(layers.classify(hidden_BND, mask_BN))
            if f"heads_{depth}" in self.names:
                active = [budgets.allocations[layer].active for layer in range(first, depth)]
                outputs.append(torch.stack([a_BH.sum(dim=1) for a_BH in active], dim=1))
            first = depth
        return tuple(outputs)


class _Attention(nn.Module):
    """An attention as ONNX Runtime computes it quickest; `fixed` says which heads every text gets."""

    def __init__(self, layer: BudgetedAttention | BiasOnly, fixed: Allocation | None, fused: bool) -> None:
        super().__init__()
        self.allocator, self.fused = layer.allocator, fused
        if isinstance(layer, BiasOnly):
            self.heads, self.bias = 0, layer.bias
            return
        present = layer.num_heads if layer.held is None else len(layer.held)
        d, D = layer.qkv.in_features // layer.num_heads, layer.qkv.in_features
        heads, weights = torch.arange(present), torch.ones(present)
        if fixed is not None and layer.held is None:
            heads = fixed.active[0].nonzero().flatten()
            weights = weights[heads] if fixed.weights is None else fixed.weights[0, heads].float()
        self.heads, self.weighted, self.bias = len(heads), fixed is None, layer.out.bias
        qkv = layer.qkv.weight.detach().view(present, 3, d, D)[heads].transpose(0, 1)  # all queries, keys, values
        self.qkv, self.out = nn.Linear(D, 3 * len(heads) * d), nn.Linear(len(heads) * d, D)
        self.qkv.weight = nn.Parameter(qkv.reshape(-1, D))
        self.qkv.bias = nn.Parameter(layer.qkv.bias.detach().view(present, 3, d)[heads].transpose(0, 1).flatten())
        back = layer.out.weight.detach().view(D, present, d)[:, heads] * weights[:, None]
        self.out.weight, self.out.bias = nn.Parameter(back.reshape(D, -1)), layer.out.bias

    def forward(
        self, x_BND: Tensor, mask_BN: Tensor, progress: float, dial: Budget, positions: Positions | None = None
    ) -> tuple[Tensor, Any]:
        if not self.heads:
            return self.bias.expand_as(x_BND), None
        width = self.out.in_features
        q, k, v = self.qkv(x_BND).split(width, dim=-1)
        if positions is None and self.fused:
            y_BNC = _Heads.apply(q, k, v, mask_BN.int(), self.heads)  # type: ignore[no-untyped-call]
        else:
            y_BNC = self._attend(q, k, v, mask_BN, positions)
        if not self.weighted:
            return self.out(y_BNC), None
        allocation = self.allocator(x_BND, mask_BN, progress, dial)
        if allocation.weights is not None:
            y_BNC = y_BNC * allocation.weights.repeat_interleave(width // self.heads, dim=1)[:, None]
        return self.out(y_BNC), allocation

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask_BN: Tensor, positions: Positions | None) -> Tensor:
        """In plain operators, with rotated queries and keys; places that see nothing real attend to everything."""
        q, k, v = (t.view(*t.shape[:2], self.heads, -1).transpose(1, 2) for t in (q, k, v))
        allowed = mask_BN[:, None, None, :]
        if positions is not None:
            window_NN = positions.window_mask(q.shape[2])
            allowed = allowed if window_NN is None else allowed & window_NN
            q, k = positions.rotate(q), positions.rotate(k)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        y: Tensor = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
        return y


def _allocations(model: BudgetFormerForSequenceClassification, dial: Dial) -> list[Allocation]:
    """What each layer's gate says, whatever the text."""
    dials, _ = model._dials(dial.heads, 1, progress := model.config.training_progress)
    x_11D = torch.zeros(1, 1, model.config.hidden_size)
    with torch.inference_mode():
        heads = zip(model.attentions, dials[: len(model.attentions)], strict=True)  # behind them: groups of neurons
        return [attention.allocator(x_11D, None, progress, dial) for attention, dial in heads]
