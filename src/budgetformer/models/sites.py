"""The attention modules of a Hugging Face encoder, replaced by ours: the same weights, a budget of heads.

Only self-attention and its output projection are replaced, and feed-forward layers where their groups of neurons have
gates; residual sums, norms and everything else stay the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from budgetformer.errors import ModelError
from budgetformer.nn.allocation import Allocation, Budget, HeadAllocator
from budgetformer.nn.attention import BudgetedAttention
from budgetformer.nn.feedforward import BudgetedFeedForward
from budgetformer.nn.ranking import FrozenHeads
from budgetformer.nn.selective import Positions

SUPPORTED = ("bert", "roberta", "distilbert", "electra", "xlm-roberta", "modernbert")


@dataclass
class Budgets:
    """What one call of the model hands down to its attention modules, and what they hand back."""

    mask: Tensor | None
    progress: float
    dials: Sequence[Budget]  # one per layer, then one per layer for its groups of neurons
    map_heads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    allocations: dict[int, Allocation] = field(default_factory=dict)
    groups: dict[int, Tensor] = field(default_factory=dict)  # their weights, (B, G), by layer
    maps: dict[int, Tensor] = field(default_factory=dict)

    def with_mask(self, mask: Tensor | None) -> Budgets:
        """The same for a part of the batch."""
        return replace(self, mask=mask, allocations={}, groups={})


class Site(NamedTuple):
    """Where a layer's attention is, what it is made of, and how to replace it."""

    q: tuple[Tensor, Tensor | None]  # weight, bias
    k: tuple[Tensor, Tensor | None]
    v: tuple[Tensor, Tensor | None]
    out: nn.Linear
    dropout: float
    after: nn.Module  # what the module applied after its output projection
    window: int | None
    replace: Callable[[nn.Module], None]


class RetrofitAttention(nn.Module):
    """BudgetedAttention in the place, and with the weights, of a pretrained attention."""

    def __init__(
        self, layer: int, core: BudgetedAttention | BiasOnly, after: nn.Module, window: int | None = None
    ) -> None:
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
        positions = None
        if position_embeddings is not None:
            cos, sin = position_embeddings
            positions = Positions(cos[0], sin[0], self.window)
        heads = budgets.map_heads.get(self.layer)
        if heads and isinstance(self.core, BudgetedAttention) and self.core.held is None:
            budgets.maps[self.layer] = self.core.maps(hidden_states, budgets.mask, heads, positions)
        dial = budgets.dials[self.layer]
        y_BND, allocation = self.core(hidden_states, budgets.mask, budgets.progress, dial, positions)
        budgets.allocations[self.layer] = allocation
        return self.after(y_BND), None


class FeedForwardSite(NamedTuple):
    """Where a layer's feed-forward part is, what it is made of, and how to replace it."""

    inner: nn.Linear
    outer: nn.Linear
    activation: nn.Module
    dropout: nn.Module | None  # of the neurons
    after: nn.Module
    replace: Callable[[nn.Module], None]


class RetrofitFeedForward(nn.Module):
    """BudgetedFeedForward in the place, and with the weights, of a pretrained feed-forward layer."""

    def __init__(self, layer: int, core: BudgetedFeedForward, after: nn.Module) -> None:
        super().__init__()
        self.layer, self.core, self.after = layer, core, after

    def forward(self, hidden_states: Tensor, budgets: Budgets) -> Tensor:
        dial = budgets.dials[len(budgets.dials) // 2 + self.layer]
        y_BND, budgets.groups[self.layer] = self.core(hidden_states, budgets.mask, budgets.progress, dial)
        out: Tensor = self.after(y_BND)
        return out


class BiasOnly(nn.Module):
    """What is left of an attention without heads: the bias of its output projection."""

    def __init__(self, width: int, allocator: HeadAllocator) -> None:
        super().__init__()
        self.allocator = allocator
        self.dropout = 0.0
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(
        self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Budget, positions: Positions | None = None
    ) -> tuple[Tensor, Allocation]:
        return self.bias.expand_as(x_BND), self.allocator(x_BND, mask_BN, progress)


def check_supported(config: Any) -> None:
    """Refuse an architecture whose attention we do not know."""
    kind = getattr(config, "model_type", None) or type(config).__name__
    if kind not in SUPPORTED:
        raise ModelError(
            f"the architecture {kind!r} is not supported: retrofit takes {', '.join(SUPPORTED)} (MiniLM is bert)"
        )
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ModelError(f"this {kind} is a decoder: retrofit takes encoders, which see the text in both directions")


def replace_sites(
    model: nn.Module,
    make: Callable[[int], HeadAllocator],
    make_groups: Callable[[int], HeadAllocator | None],
    gain: float = 1.0,
) -> None:
    """Put our modules at every site, with the weights that are there; frozen heads and groups take theirs alone.

    `make` gives a layer's allocator of heads, `make_groups` that of its groups of neurons, or None. `gain`: every
    head's initial gate weight; W_O is divided by it, so the output is unchanged.
    """
    for layer, part in enumerate(list(_feedforward_sites(model))):
        if (gate := make_groups(layer)) is not None:
            feedforward = BudgetedFeedForward(gate, part.inner, part.outer, part.activation, part.dropout)
            part.replace(RetrofitFeedForward(layer, feedforward, part.after))
    for layer, site in enumerate(list(_sites(model))):
        allocator = make(layer)
        held = allocator.heads if isinstance(allocator, FrozenHeads) else None
        core = _bias_only(site, allocator) if held == [] else _budgeted(site, allocator, held, gain)
        site.replace(RetrofitAttention(layer, core, site.after, site.window))


def _budgeted(site: Site, allocator: HeadAllocator, held: Sequence[int] | None, gain: float) -> BudgetedAttention:
    width = site.out.weight.shape[0]
    core = BudgetedAttention(width, allocator, site.dropout, held)
    weight, bias = join_heads(site, allocator.num_heads)
    out = site.out.weight.detach() / gain if gain != 1 else site.out.weight.detach().clone()
    core.qkv.weight, core.out.weight = nn.Parameter(weight), nn.Parameter(out)
    core.qkv.bias = nn.Parameter(bias, requires_grad=site.q[1] is not None)
    core.out.bias = _out_bias(site)
    if held is not None:
        core.select(held)
    return core


def _bias_only(site: Site, allocator: HeadAllocator) -> BiasOnly:
    core = BiasOnly(len(site.out.weight), allocator)
    core.bias = _out_bias(site)
    return core


def _out_bias(site: Site) -> nn.Parameter:
    bias = torch.zeros_like(site.out.weight[:, 0]) if site.out.bias is None else site.out.bias.detach().clone()
    return nn.Parameter(bias, requires_grad=site.out.bias is not None)


def set_dropout(model: nn.Module, rate: float | None, attention: float | None) -> None:
    """Change the dropout of a retrofitted encoder and its classifier, and that of attention, where one is given."""
    layers = [module for module in model.modules() if isinstance(module, RetrofitAttention)]
    after = {id(layer.after) for layer in layers}  # goes with the maps' dropout
    if attention is not None:
        for layer in layers:
            layer.core.dropout = attention
    for module in model.modules():
        new_rate = attention if id(module) in after else rate
        if isinstance(module, nn.Dropout) and new_rate is not None:
            module.p = new_rate


def join_heads(site: Site, heads: int) -> tuple[Tensor, Tensor]:
    """The weights of q, k and v with rows head by head, its q, k, v; a missing bias is zero."""
    weights = torch.stack([w.detach().view(heads, -1, w.shape[1]) for w, _ in (site.q, site.k, site.v)], dim=1)
    pieces = [torch.zeros_like(w[:, 0]) if b is None else b for w, b in (site.q, site.k, site.v)]
    biases = torch.stack([b.detach().view(heads, -1) for b in pieces], dim=1)
    return weights.flatten(0, 2).contiguous(), biases.flatten().contiguous()


def restore_plain(model: nn.Module, plain: nn.Module) -> None:
    """Write a retrofitted model's weights back into an ordinary one of the same shape, all units at weight 1."""
    sites, feedforwards = list(_sites(plain)), list(_feedforward_sites(plain))
    state = {k: v for k, v in model.state_dict().items() if ".core." not in k}
    _, unexpected = plain.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    with torch.no_grad():
        cores = [module.core for module in model.modules() if isinstance(module, RetrofitAttention)]
        for core, site in zip(cores, sites, strict=True):
            assert isinstance(core, BudgetedAttention)
            weights = core.qkv.weight.view(core.num_heads, 3, -1, site.out.weight.shape[0])
            biases = core.qkv.bias.view(core.num_heads, 3, -1)
            for number, (weight, bias) in enumerate((site.q, site.k, site.v)):
                weight.copy_(weights[:, number].flatten(0, 1))
                if bias is not None:
                    bias.copy_(biases[:, number].flatten())
            site.out.weight.copy_(core.out.weight)
            if site.out.bias is not None:
                site.out.bias.copy_(core.out.bias)
    for module in (part for part in model.modules() if isinstance(part, RetrofitFeedForward)):
        feedforwards[module.layer].inner.load_state_dict(module.core.inner.state_dict())
        feedforwards[module.layer].outer.load_state_dict(module.core.outer.state_dict())


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
    layer, output = attention.self, attention.output

    def replace(module: nn.Module) -> None:  # residual sum, dropout and norm stay in `output`
        attention.self, output.dense = module, nn.Identity()

    window, after = None, nn.Identity()
    return Site(
        _pair(layer.query), _pair(layer.key), _pair(layer.value), output.dense, layer.dropout.p, after, window, replace
    )  # fmt: skip


def _distilbert_site(parent: nn.Module, name: str, layer: Any) -> Site:
    return Site(
        _pair(layer.q_lin), _pair(layer.k_lin), _pair(layer.v_lin), layer.out_lin, layer.dropout.p, nn.Identity(), None,
        lambda module: setattr(parent, name, module),
    )  # fmt: skip


def _modernbert_site(parent: nn.Module, name: str, layer: Any) -> Site:
    weights, bias = layer.Wqkv.weight.chunk(3), layer.Wqkv.bias
    biases = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = zip(weights, biases, strict=True)
    window = None if layer.sliding_window is None else layer.sliding_window - 1
    return Site(
        q, k, v, layer.Wo, layer.attention_dropout, layer.out_drop, window, lambda module: setattr(parent, name, module)
    )  # fmt: skip


def _feedforward_sites(model: nn.Module) -> Iterator[FeedForwardSite]:
    """Every feed-forward part of a pretrained encoder, first layer first. Modules are known by what they hold."""
    for parent in model.modules():
        for name, child in parent.named_children():
            held, part, put = set(dict(child.named_children())), cast("Any", child), partial(setattr, parent, name)
            if {"intermediate", "output"} <= held and hasattr(part.intermediate, "dense"):
                yield _bert_feedforward(part)
            elif {"lin1", "lin2"} <= held:
                yield FeedForwardSite(part.lin1, part.lin2, part.activation, None, part.dropout, put)
            elif {"Wi", "Wo"} <= held:
                yield FeedForwardSite(part.Wi, part.Wo, part.act, part.drop, nn.Identity(), put)


def _bert_feedforward(layer: Any) -> FeedForwardSite:
    inner, outer, activation = layer.intermediate.dense, layer.output.dense, layer.intermediate.intermediate_act_fn

    def replace(module: nn.Module) -> None:  # residual sum, dropout and norm stay in `output`
        layer.intermediate, layer.output.dense = module, nn.Identity()

    return FeedForwardSite(inner, outer, activation, None, nn.Identity(), replace)
