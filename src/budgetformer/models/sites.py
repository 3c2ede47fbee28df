"""The attention modules of a Hugging Face encoder, replaced by ours: the same weights, a budget of heads.

Only self-attention and its output projection are replaced; residual sums, norms and everything else stay the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budgetformer.errors import ModelError
from budgetformer.nn.allocation import Allocation, Dial, HeadAllocator
from budgetformer.nn.attention import BudgetedAttention
from budgetformer.nn.ranking import GivenHeads
from budgetformer.nn.selective import Placement

SUPPORTED = ("bert", "roberta", "distilbert", "electra", "xlm-roberta", "modernbert")


@dataclass
class Budgets:
    """What one call of the model hands down to its attention modules, and what they hand back."""

    mask: Tensor | None
    progress: float
    dials: Sequence[Dial | None]  # one a layer
    map_heads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    allocations: dict[int, Allocation] = field(default_factory=dict)
    maps: dict[int, Tensor] = field(default_factory=dict)


class Site(NamedTuple):
    """Where a layer's attention is, what it is made of, and how to put another in its place."""

    q: tuple[Tensor, Tensor | None]  # weight, bias
    k: tuple[Tensor, Tensor | None]
    v: tuple[Tensor, Tensor | None]
    out: nn.Linear
    dropout: float
    after: nn.Module  # what the module applied behind its output projection
    window: int | None
    put: Callable[[nn.Module], None]


class RetrofitAttention(nn.Module):
    """BudgetedAttention in the place, and with the weights, of a pretrained attention."""

    def __init__(self, layer: int, core: BudgetedAttention, after: nn.Module, window: int | None) -> None:
        super().__init__()
        self.layer = layer
        self.core = core
        self.after = after
        self.window = window

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        budgets: Budgets,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> tuple[Tensor, None]:
        place = None
        if position_embeddings is not None:
            cos, sin = position_embeddings
            place = Placement(cos[0], sin[0], self.window)
        if heads := budgets.map_heads.get(self.layer):
            budgets.maps[self.layer] = self.core.maps(hidden_states, budgets.mask, heads, place)
        dial = budgets.dials[self.layer]
        y_BND, allocation = self.core(hidden_states, budgets.mask, budgets.progress, dial, place)
        budgets.allocations[self.layer] = allocation
        return self.after(y_BND), None


class FrozenAttention(nn.Module):
    """Ordinary attention with the heads that were kept: no gate, no routing, smaller matrices."""

    def __init__(
        self,
        layer: int,
        allocator: GivenHeads,
        width: int,
        head: int,
        dropout: float,
        after: nn.Module,
        window: int | None,
    ) -> None:
        super().__init__()
        self.layer, self.allocator, self.dropout, self.after, self.window = layer, allocator, dropout, after, window
        inner = len(allocator.kept) * head
        self.qkv = nn.Linear(width, 3 * inner) if inner else None
        self.out = nn.Linear(inner, width) if inner else None
        self.bias = None if inner else nn.Parameter(torch.zeros(width))  # what is left of a layer without heads

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        budgets: Budgets,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> tuple[Tensor, None]:
        allocation = self.allocator(hidden_states, budgets.mask, budgets.progress)
        budgets.allocations[self.layer] = allocation
        if self.qkv is None or self.out is None:
            assert self.bias is not None
            return self.after(self.bias.expand_as(hidden_states)), None
        B, N, _D = hidden_states.shape
        q, k, v = self.qkv(hidden_states).view(B, N, len(self.allocator.kept), 3, -1).permute(3, 0, 2, 1, 4)
        mask = None if budgets.mask is None else budgets.mask[:, None, None, :]
        if position_embeddings is not None:
            place = Placement(position_embeddings[0][0], position_embeddings[1][0], self.window)
            q, k, near = place.rotate(q), place.rotate(k), place.near(N)
            mask = near if mask is None else mask if near is None else mask & near
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0)
        return self.after(self.out(y.transpose(1, 2).reshape(B, N, -1))), None


def check_supported(config: Any) -> None:
    """Refuse an architecture whose attention we do not know."""
    kind = getattr(config, "model_type", None) or type(config).__name__
    if kind not in SUPPORTED:
        raise ModelError(
            f"the architecture {kind!r} is not supported: retrofit takes {', '.join(SUPPORTED)} (MiniLM is bert)"
        )
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ModelError(f"this {kind} is a decoder: retrofit takes encoders, which see the text in both directions")


def replace_attention(model: nn.Module, make: Callable[[int], HeadAllocator], gain: float = 1.0) -> int:
    """Put a RetrofitAttention at every site, with the weights that are there. Returns the number of layers.

    `make` gives a layer's allocator; `gain` is the weight that its heads start with, which the output projection makes
    up for.
    """
    layer = -1
    for layer, site in enumerate(list(_sites(model))):
        width = site.out.weight.shape[0]
        core = BudgetedAttention(width, allocator := make(layer), site.dropout)
        weight, bias = join_heads(site, allocator.num_heads)
        with torch.no_grad():
            core.qkv.weight = nn.Parameter(weight)
            core.qkv.bias = nn.Parameter(bias, requires_grad=site.q[1] is not None)
            core.out.weight = nn.Parameter(site.out.weight / gain if gain != 1 else site.out.weight.detach().clone())
            back = torch.zeros_like(site.out.weight[:, 0]) if site.out.bias is None else site.out.bias.detach().clone()
            core.out.bias = nn.Parameter(back, requires_grad=site.out.bias is not None)
        site.put(RetrofitAttention(layer, core, site.after, site.window))
    return layer + 1


def set_dropout(model: nn.Module, rate: float | None, attention: float | None) -> None:
    """Change the dropout of a retrofitted encoder and its classifier, and that of attention, where one is given."""
    layers = [module for module in model.modules() if isinstance(module, RetrofitAttention)]
    behind = {id(layer.after) for layer in layers}  # goes with the maps' dropout
    if attention is not None:
        for layer in layers:
            layer.core.dropout = attention
    for module in model.modules():
        chosen = attention if id(module) in behind else rate
        if isinstance(module, nn.Dropout) and chosen is not None:
            module.p = chosen


def join_heads(site: Site, heads: int) -> tuple[Tensor, Tensor]:
    """The weights of q, k and v with rows head by head, its q, k, v; a missing bias is zero."""
    weights = torch.stack([w.detach().view(heads, -1, w.shape[1]) for w, _ in (site.q, site.k, site.v)], dim=1)
    pieces = [torch.zeros_like(w[:, 0]) if b is None else b for w, b in (site.q, site.k, site.v)]
    biases = torch.stack([b.detach().view(heads, -1) for b in pieces], dim=1)
    return weights.flatten(0, 2).contiguous(), biases.flatten().contiguous()


def freeze_attention(model: nn.Module, kept: Sequence[Sequence[int]]) -> None:
    """Put a FrozenAttention with the kept heads in the place of every RetrofitAttention."""
    for parent, name, module in list(_retrofitted(model)):
        core, heads = module.core, kept[module.layer]
        allocator = GivenHeads(core.num_heads, heads)
        width = core.out.weight.shape[0]
        d = width // core.num_heads
        small = FrozenAttention(module.layer, allocator, width, d, core.dropout, module.after, module.window)
        small.to(core.out.weight.device)
        with torch.no_grad():
            if small.qkv is not None and small.out is not None:
                rows = torch.cat([torch.arange(3 * h * d, 3 * (h + 1) * d) for h in allocator.kept])
                columns = torch.cat([torch.arange(h * d, (h + 1) * d) for h in allocator.kept])
                small.qkv.weight = nn.Parameter(core.qkv.weight[rows].clone())
                small.qkv.bias = nn.Parameter(core.qkv.bias[rows].clone(), core.qkv.bias.requires_grad)
                small.out.weight = nn.Parameter(core.out.weight[:, columns].clone())
                small.out.bias = nn.Parameter(core.out.bias.clone(), core.out.bias.requires_grad)
            else:
                small.bias = nn.Parameter(core.out.bias.clone(), core.out.bias.requires_grad)
        setattr(parent, name, small)


def restore_attention(model: nn.Module, plain: nn.Module) -> None:
    """Write a retrofitted model's weights back into an ordinary one of the same shape, all heads at weight 1."""
    sites = list(_sites(plain))
    state = {k: v for k, v in model.state_dict().items() if ".core." not in k}
    _, unexpected = plain.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    with torch.no_grad():
        for (_, _, module), site in zip(_retrofitted(model), sites, strict=True):
            weights = module.core.qkv.weight.view(module.core.num_heads, 3, -1, site.out.weight.shape[0])
            biases = module.core.qkv.bias.view(module.core.num_heads, 3, -1)
            for number, (weight, bias) in enumerate((site.q, site.k, site.v)):
                weight.copy_(weights[:, number].flatten(0, 1))
                if bias is not None:
                    bias.copy_(biases[:, number].flatten())
            site.out.weight.copy_(module.core.out.weight)
            if site.out.bias is not None:
                site.out.bias.copy_(module.core.out.bias)


def _retrofitted(model: nn.Module) -> Iterator[tuple[nn.Module, str, RetrofitAttention]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, RetrofitAttention):
                yield parent, name, child


def _sites(model: nn.Module) -> Iterator[Site]:
    """Every attention of a pretrained encoder, first layer first. Modules are known by what they hold."""
    for parent in model.modules():
        for name, child in parent.named_children():
            held = set(dict(child.named_children()))
            if {"self", "output"} <= held and hasattr(child.self, "query"):
                yield _bert_site(child)
            elif {"q_lin", "k_lin", "v_lin", "out_lin"} <= held:
                yield _distilbert_site(parent, name, child)
            elif {"Wqkv", "Wo"} <= held:
                yield _modernbert_site(parent, name, child)


def _pair(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias


def _bert_site(attention: Any) -> Site:
    own, output = attention.self, attention.output

    def put(module: nn.Module) -> None:  # residual sum, dropout and norm stay in `output`
        attention.self, output.dense = module, nn.Identity()

    window, after = None, nn.Identity()
    return Site(
        _pair(own.query), _pair(own.key), _pair(own.value), output.dense, own.dropout.p, after, window, put
    )  # fmt: skip


def _distilbert_site(parent: nn.Module, name: str, own: Any) -> Site:
    return Site(
        _pair(own.q_lin), _pair(own.k_lin), _pair(own.v_lin), own.out_lin, own.dropout.p, nn.Identity(), None,
        lambda module: setattr(parent, name, module),
    )  # fmt: skip


def _modernbert_site(parent: nn.Module, name: str, own: Any) -> Site:
    weights, bias = own.Wqkv.weight.chunk(3), own.Wqkv.bias
    biases = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = zip(weights, biases, strict=True)
    window = None if own.sliding_window is None else own.sliding_window - 1
    return Site(
        q, k, v, own.Wo, own.attention_dropout, own.out_drop, window, lambda module: setattr(parent, name, module)
    )  # fmt: skip
