"""Which heads an input gets: pooled input -> Allocation (budget s, relevance p, weights w, active heads).

Shapes: B samples, N tokens, D model width, H heads. `mask` is padding: True on real tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budgetformer.dial import Dial
from budgetformer.errors import UsageError
from budgetformer.nn.exploration import Exploration
from budgetformer.nn.selective import exporting

# How softly the relaxed count of heads goes from one head to the next, in heads.
_COUNT_SOFTNESS = 0.5
# A dial of 0.7 over 10 heads means 7 of them, although 0.7 * 10 may round to 6.999...
ROUNDING_SLACK = 1e-6


class Allocation(NamedTuple):
    """What one layer decided for every sample of a batch.

    `heads` is the number of heads that top-k keeps; `active` marks those that were evaluated, which is all of
    them where top-k is not applied (soft training). `weights` multiplies each head's output and is zero on
    inactive heads; None means that heads are not weighted at all.
    """

    budget: Tensor  # s, (B,) fp32
    relevance: Tensor  # p, (B, H) fp32
    heads: Tensor  # k, (B,) int64
    active: Tensor  # (B, H) bool
    weights: Tensor | None  # w, (B, H) fp32
    groups: Tensor | None = None  # the weights of the layer's groups of feed-forward neurons, (B, G), 0 or 1


class LayerThreshold(NamedTuple):
    """A dial resolved for one layer of ranked heads: the score threshold and, for fixed and max, its quota of heads."""

    mode: str
    threshold: Tensor | float  # a number, or (B, 1)
    quota: int = 0


Budget = Dial | LayerThreshold  # what a layer's gate takes at evaluation


@dataclass(frozen=True)
class Selection:
    """How a budget becomes a set of weighted heads."""

    min_heads: int = 1  # 0 lets an input skip a layer's attention altogether
    rounding: Literal["floor", "round", "ceil"] = "floor"
    budget_as: Literal["gain", "count"] = "gain"  # s scales the output (the paper), or s only counts heads
    renormalize: bool = False  # spread the dropped heads' weight over the kept ones
    topk_from: float | None = None  # progress from which training keeps only the top k; None: never
    pool_padding: bool = False  # mean over all N positions, as the paper prints it

    def __post_init__(self) -> None:
        if self.min_heads < 0:
            raise UsageError(f"min_heads={self.min_heads}: give 0 (attention may be skipped) or more")
        if self.budget_as not in ("gain", "count"):
            raise UsageError(f"budget_as={self.budget_as!r}: give gain or count")
        if self.rounding not in ("floor", "round", "ceil"):
            raise UsageError(f"rounding={self.rounding!r}: give floor, round or ceil")
        if self.topk_from is not None and not 0 <= self.topk_from <= 1:
            raise UsageError(f"topk_from={self.topk_from}: give a progress in [0, 1], or none for never")

    def count(self, budget: Tensor, num_heads: int) -> Tensor:
        """k = max(min_heads, floor(s H)), at most H."""
        round_ = {"floor": torch.floor, "round": torch.round, "ceil": torch.ceil}[self.rounding]
        sH = budget * num_heads + self.slack if self.slack else budget * num_heads
        return round_(sH).long().clamp(min(self.min_heads, num_heads), num_heads)

    @property
    def slack(self) -> float:
        """What is added to s H before rounding, so that s = k / H means k heads whatever the last bit."""
        return {"floor": ROUNDING_SLACK, "round": 0.0, "ceil": -ROUNDING_SLACK}[self.rounding]

    def apply_budget(self, heads: Tensor, dial: Dial, num_heads: int) -> Tensor:
        """The number of heads that `dial` makes of the learned number."""
        if dial.mode == "full":
            return torch.full_like(heads, num_heads)
        if dial.mode == "mean":
            raise UsageError(
                f"budget {dial}: a mean over inputs is for heads that are ranked across layers (train --base); "
                "give fixed:X or max:X"
            )
        if dial.mode in ("fixed", "max"):
            assert dial.value is not None
            ceiling = max(min(self.min_heads, num_heads), int(dial.value * num_heads + ROUNDING_SLACK))
            return heads.clamp(max=ceiling) if dial.mode == "max" else torch.full_like(heads, ceiling)
        return heads


def ranks(relevance: Tensor) -> Tensor:
    """Each head's place by relevance, 0 for the most relevant; of equals, the lower index wins. (B, H) -> (B, H)."""
    if exporting():  # a stable sort is no operator of ONNX
        place_H, other, one = torch.arange(relevance.shape[-1]), relevance[..., None, :], relevance[..., None]
        return ((other > one) | ((other == one) & (place_H < place_H[:, None]))).sum(dim=-1)
    order = relevance.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(relevance.shape[-1], device=relevance.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def top_k(relevance: Tensor, heads: Tensor) -> Tensor:
    """Mark the k most relevant heads of each sample. (B, H), (B,) -> (B, H) bool."""
    return ranks(relevance) < heads[:, None]


def pool(x_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """The mean over real tokens, in fp32; over all of them where there is no mask. (B, N, D) -> (B, D)."""
    if mask_BN is None:
        return x_BND.mean(dim=1, dtype=torch.float32)
    share_BN = mask_BN.float() / mask_BN.sum(dim=1, keepdim=True)
    return torch.bmm(share_BN[:, None], x_BND.float()).squeeze(1)


def first_token(hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """The state of each sample's first real token, wherever its padding is. -> (B, D)."""
    if mask_BN is None:
        return hidden_BND[:, 0]
    return hidden_BND[torch.arange(hidden_BND.shape[0], device=hidden_BND.device), mask_BN.int().argmax(dim=1)]


def allocate(
    budget: Tensor, relevance: Tensor, selection: Selection, *, keep_top: bool, dial: Dial | None = None
) -> Allocation:
    """Turn s and p into weights and active heads: w = s H p, masked to the top k where `keep_top`."""
    H = relevance.shape[-1]
    heads = selection.apply_budget(selection.count(budget, H), dial or Dial(), H)
    if selection.budget_as == "count":
        return _allocate_count(budget, relevance, heads, keep_top)
    weights = budget[:, None] * H * relevance
    if not keep_top:
        return Allocation(budget, relevance, heads, torch.ones_like(relevance, dtype=torch.bool), weights)
    active = top_k(relevance, heads)
    if selection.renormalize:
        total = (relevance * active).sum(dim=-1, keepdim=True)
        weights = weights / torch.where(active.any(dim=-1, keepdim=True), total, torch.ones_like(total))
    return Allocation(budget, relevance, heads, active, weights * active)


def _allocate_count(budget: Tensor, relevance: Tensor, heads: Tensor, keep_top: bool) -> Allocation:
    """s counts heads and does not scale them: weights are p over the kept heads, with a mean of 1.

    The number of heads is a step function of s. Its gradient is that of a sigmoid over ranks, so that s learns from
    what one head more or less would do (straight-through where only the top k are kept).
    """
    rank = ranks(relevance)
    active = rank < heads[:, None] if keep_top else torch.ones_like(relevance, dtype=torch.bool)
    if keep_top and not torch.is_grad_enabled():
        indicator = active.float()
    else:
        soft = ((budget[:, None] * relevance.shape[-1] - rank - 0.5) / _COUNT_SOFTNESS).sigmoid()
        indicator = active + (soft - soft.detach()) if keep_top else soft
    share = relevance * indicator
    total = share.sum(dim=-1, keepdim=True)
    any_active = active.any(dim=-1, keepdim=True)
    weights = indicator.sum(dim=-1, keepdim=True) * share / torch.where(any_active, total, torch.ones_like(total))
    weights = torch.where(any_active, weights, share)
    return Allocation(budget, relevance, heads, active, weights)  # exactly zero, with a gradient, on inactive heads


class HeadAllocator(nn.Module, ABC):
    """Decides from a layer's input which heads each sample gets. Computes in fp32 whatever the precision.

    What a kind of gate can do is declared here, and asked for by everything that runs, prices or exports a model.
    """

    selects: ClassVar[bool] = True  # may leave heads out
    can_dial: ClassVar[bool] = True  # a budget at prediction time changes how many heads run
    per_input: ClassVar[bool] = True  # inputs differ in the heads that they get
    ranks_layers: ClassVar[bool] = False  # the heads of all layers are in one order: mean:X, freezing
    exportable: ClassVar[bool] = True  # a graph can hold it
    random: ClassVar[bool] = False  # draws heads at evaluation too
    has_budget_net: ClassVar[bool] = False  # what computing the gate costs
    has_scorer: ClassVar[bool] = False

    reads_padding = False  # where True, hidden states must be right at padding too

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    @abstractmethod
    def forward(self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Budget | None = None) -> Allocation:
        """Allocate heads at this progress; `dial` counts at evaluation only."""


class AllHeads(HeadAllocator):
    """The standard Transformer: every head, unweighted, no parameters. The dial has nothing to turn."""

    selects = can_dial = per_input = False

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Budget | None = None) -> Allocation:
        (B, H), device = (len(x_BND), self.num_heads), x_BND.device
        ones = torch.ones(B, H, device=device)
        return Allocation(ones[:, 0], ones / H, torch.full((B,), H, device=device), ones.bool(), weights=None)


class GatedHeads(HeadAllocator):
    """An allocator with a budget and scores: of the nets f and g, where a subclass does not say otherwise."""

    budget_net: BudgetNet
    scorer: Linear32

    def __init__(self, num_heads: int, exploration: Exploration, selection: Selection) -> None:
        super().__init__(num_heads)
        self.exploration = exploration
        self.selection = selection
        self.reads_padding = selection.pool_padding
        if selection.min_heads > num_heads:
            raise UsageError(f"min_heads={selection.min_heads} exceeds the {num_heads} heads of a layer: lower it")

    def budget(self, pooled_BD: Tensor) -> Tensor:
        """s in [0, 1] for each sample. (B, D) -> (B,)."""
        out: Tensor = self.budget_net(pooled_BD)
        return out

    def scores(self, pooled_BD: Tensor) -> Tensor:
        """The heads' scores z before noise. (B, D) -> (B, H)."""
        out: Tensor = self.scorer(pooled_BD)
        return out

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Budget | None = None) -> Allocation:
        assert not isinstance(dial, LayerThreshold)
        dial = Dial() if self.training or dial is None else dial
        with torch.autocast(x_BND.device.type, enabled=False):
            pooled_BD = pool(x_BND, None if self.selection.pool_padding else mask_BN)
            budget = self.budget(pooled_BD)
            scores = self.scores(pooled_BD)
            if dial.mode == "override":
                budget = torch.full_like(budget, dial.value or 0.0)
            if dial.mode == "random":
                scores = torch.randn_like(scores)
            if self.training:
                scores = scores + torch.randn_like(scores) * self.exploration.noise(progress)
            relevance = F.softmax(scores / self.exploration.temperature(progress), dim=-1)
            topk_from = self.selection.topk_from
            keep_top = not self.training or (topk_from is not None and progress >= topk_from)
            return allocate(budget, relevance, self.selection, keep_top=keep_top, dial=dial)


class Linear32(nn.Linear):
    """A Linear that computes in fp32 even where the model was cast to a lower precision."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


class BudgetNet(nn.Sequential):
    """f: Linear(D, D), ReLU, Linear(D, 1); s = sigmoid(f(h))."""

    def __init__(self, width: int) -> None:
        super().__init__(Linear32(width, width), nn.ReLU(), Linear32(width, 1))

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
        return out.squeeze(-1).sigmoid()


class LearnedHeads(GatedHeads):
    """The paper's allocator: a budget net f and a head scorer g, both of the pooled input."""

    has_budget_net = has_scorer = True

    def __init__(self, width: int, num_heads: int, exploration: Exploration, selection: Selection) -> None:
        super().__init__(num_heads, exploration, selection)
        self.budget_net = BudgetNet(width)
        self.scorer = Linear32(width, num_heads)


class FixedBudget(GatedHeads):
    """The first ablation, trained so: s is a constant, the scorer g is learned."""

    has_scorer = True

    def __init__(
        self, width: int, num_heads: int, exploration: Exploration, selection: Selection, fixed_budget: float
    ) -> None:
        super().__init__(num_heads, exploration, selection)
        if not 0 <= fixed_budget <= 1:
            raise UsageError(f"fixed_budget={fixed_budget}: give the fraction of heads, in [0, 1]")
        self.fixed_budget = fixed_budget
        self.scorer = Linear32(width, num_heads)

    def budget(self, pooled_BD: Tensor) -> Tensor:
        return pooled_BD.new_full((pooled_BD.shape[0],), self.fixed_budget)


class RandomHeads(GatedHeads):
    """The second ablation, trained so: f is learned, the scores are drawn anew from N(0, 1) at every call."""

    exportable = False
    random = has_budget_net = True

    def __init__(self, width: int, num_heads: int, exploration: Exploration, selection: Selection) -> None:
        super().__init__(num_heads, exploration, selection)
        self.budget_net = BudgetNet(width)

    def scores(self, pooled_BD: Tensor) -> Tensor:
        return torch.randn(pooled_BD.shape[0], self.num_heads, device=pooled_BD.device)


class StaticHeads(GatedHeads):
    """The control that the paper lacks: one learned s and one learned p per layer, whatever the input."""

    per_input = False

    def __init__(self, num_heads: int, exploration: Exploration, selection: Selection) -> None:
        super().__init__(num_heads, exploration, selection)
        self.budget_logit = nn.Parameter(torch.zeros(()))
        self.score = nn.Parameter(torch.zeros(num_heads))

    def budget(self, pooled_BD: Tensor) -> Tensor:
        return self.budget_logit.float().sigmoid().expand(pooled_BD.shape[0])

    def scores(self, pooled_BD: Tensor) -> Tensor:
        return self.score.float().expand(pooled_BD.shape[0], -1)
