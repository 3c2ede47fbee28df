"""Heads ranked across the layers of a model: one order for all of them, from which an input may depart.

Every head has a static score, comparable between layers, and what the input adds to it. Heads above a threshold run at
their full weight, so a layer may get none. The right threshold on the static scores keeps any share of all heads.

Groups of feed-forward neurons may join the order, by gates of the same class whose heads they are. Heads and groups are
the units of a model; they have prices, and a share is one of all prices.

Shapes: B samples, N tokens, D model width, H heads, U units of all gates. `mask` is padding: True on real tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budgetformer.dial import Dial
from budgetformer.errors import UsageError
from budgetformer.nn.allocation import (
    ROUNDING_SLACK,
    Allocation,
    Budget,
    HeadAllocator,
    LayerThreshold,
    Linear32,
    pool,
    ranks,
)

# How far from the threshold a head still feels a gradient; static scores begin evenly spread over (0, 1).
_SOFTNESS = 0.1
ALWAYS = 1000.0  # a score that others do not reach by training
_CENTRE_MOMENTUM = 0.05  # how far a step of training moves the mean input

ThresholdOffsets = Sequence[Sequence[float]]  # (heads kept in the model, offset) pairs, ascending; linear in between


@dataclass(frozen=True)
class RankingOptions:
    """How ranked heads are trained, and what they do without a dial."""

    target_budget: float | None = 0.5  # the share of prices that `learned` keeps; None: scores above 0
    target_weight: float = 1.0
    cost_weight: float = 0.0  # a price on executed FLOPs
    learn_order: bool = True  # False keeps the static order that training began with
    budget_low: float = 0.1  # training draws budgets from here to 1 for half of the samples; 1: draws none
    ramp: float = 0.3  # the progress over which budgets fall from 1 to what is asked for
    renormalize: bool = False  # spread the dropped heads' weight over the kept ones
    group_size: int = 0  # feed-forward neurons that are left out together, such as 64; 0: they all run
    keep_heads: bool = False  # groups are left out first; heads only where a budget is less than all of them cost
    price_tokens: int = 128  # the length of text at which heads and groups are priced, by their FLOPs
    groups_price: float | None = None  # what a layer's groups cost of all its units, instead; such as by their time
    threshold_offsets: ThresholdOffsets | None = None  # so that mean:X executes X; see models.importance

    def __post_init__(self) -> None:
        for name in ("budget_low", "ramp", "target_budget"):
            if (value := getattr(self, name)) is not None and not 0 <= value <= 1:
                raise UsageError(f"{name}={value}: give a number in [0, 1]")
        for name in ("target_weight", "cost_weight", "group_size", "price_tokens"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)}: give a number that is not negative")
        if self.groups_price is not None and not 0 < self.groups_price < 1:
            raise UsageError(f"groups_price={self.groups_price}: give a number between 0 and 1, such as 0.6")
        if (self.keep_heads or self.groups_price is not None) and not self.group_size:
            raise UsageError("keep_heads and groups_price are about groups of neurons: give group_size, such as 64")

    def ramped_share(self, share: float, progress: float) -> float:
        """The budget at this progress on the way from 1 to `share`."""
        return 1 - (1 - share) * (min(1.0, progress / self.ramp) if self.ramp else 1.0)

    def target(self, progress: float) -> float | None:
        """The target budget at this progress."""
        return None if self.target_budget is None else self.ramped_share(self.target_budget, progress)


def thresholds(scores: Tensor, offsets: ThresholdOffsets | None = None) -> Tensor:
    """Entry k is the threshold that keeps the k highest of all static scores. -> (U + 1,).

    `offsets` move the thresholds where inputs depart from the static scores.
    """
    falling = scores.detach().float().flatten().sort(descending=True).values
    ends = falling.new_tensor([float("inf"), float("-inf")])
    table = torch.cat([ends[:1], (falling[1:] + falling[:-1]) / 2, ends[1:]])
    if offsets:
        at, by = table.new_tensor(offsets).T.contiguous()
        places = torch.arange(len(table), device=table.device, dtype=table.dtype)
        right = torch.searchsorted(at, places).clamp(max=len(at) - 1)
        left = (right - 1).clamp(min=0)
        way = ((places - at[left]) / (at[right] - at[left]).clamp(min=1)).clamp(0, 1)
        table = (table + by[left].lerp(by[right], way)).cummin(dim=0).values  # more heads, never a higher threshold
    return table


def cumulative_prices(scores: Tensor, prices: Tensor | None) -> Tensor | None:
    """What the k units with the highest scores cost together, as a share of all, for every k. -> (U,), ascending."""
    if prices is None:
        return None
    paid = prices.double()[scores.detach().float().flatten().sort(descending=True).indices].cumsum(dim=0)
    return (paid / paid[-1]).float()


def score_above_share(scores_RU: Tensor, share: float, prices_U: Tensor | None) -> Tensor:
    """The score above which the units of all rows cost this share; None: all cost the same."""
    if prices_U is None:
        return scores_RU.quantile(1 - share)
    falling = scores_RU.flatten().sort(descending=True)
    paid = cumulative_prices(scores_RU, prices_U.expand_as(scores_RU).flatten())
    assert paid is not None
    last = int(torch.searchsorted(paid, share + ROUNDING_SLACK, right=True))  # so many are above it
    return falling.values[max(0, last - 1) : last + 1].mean()


def threshold_at(share_B: Tensor, table: Tensor, paid_U: Tensor | None = None) -> Tensor:
    """The threshold that keeps as many units as cost this share together; None: all cost the same. (B,) -> (B, 1)."""
    if paid_U is None:
        return table[(share_B * (len(table) - 1) + ROUNDING_SLACK).long()][:, None]
    return table[torch.searchsorted(paid_U, share_B + ROUNDING_SLACK, right=True)][:, None]


def resolve_budget(
    dial: Dial,
    scores: Sequence[Tensor] | Tensor,
    target: float | None,
    offsets: ThresholdOffsets | None = None,
    prices: Tensor | None = None,
) -> list[LayerThreshold]:
    """The dial resolved for each gate, by its scores. `target` is the share that `learned` keeps; None: scores above 0.

    `mean` gives all gates one threshold: the share is a mean over inputs. `fixed` and `max` give each gate the number
    that the static order gives it, to every input or as a ceiling: a layer may get fewer than its gate asks.
    """
    every = torch.cat(list(scores))
    table, paid = thresholds(every, offsets), cumulative_prices(every, prices)
    shares = torch.tensor([1.0 if target is None else target, 1.0 if dial.value is None else dial.value])
    learned, limit = threshold_at(shares.to(table.device), table, paid)[:, 0].tolist()
    learned = 0.0 if target is None else learned
    threshold = {"full": float("-inf"), "learned": learned, "random": learned, "max": learned}.get(dial.mode, limit)
    if dial.mode in ("fixed", "max"):  # they count units, by the static order
        limit = float(threshold_at(shares[1:].to(table.device), thresholds(every), paid))
        return [LayerThreshold(dial.mode, threshold, int((score > limit).sum())) for score in scores]
    return [LayerThreshold(dial.mode, threshold)] * len(scores)


def draw_budgets(
    scores: Tensor, batch: int, options: RankingOptions, progress: float, prices: Tensor | None = None
) -> tuple[LayerThreshold, Tensor]:
    """What a step of training asks for: thresholds (B, 1), and the shares of prices (B,), NaN where the price decides.

    Half of the samples get the target, the others a drawn share.
    """
    table, paid, target = thresholds(scores), cumulative_prices(scores, prices), options.target(progress)
    low = options.ramped_share(options.budget_low, progress)
    drawn_B = low + (1 - low) * torch.rand(batch, device=table.device) ** 2  # few heads are harder to learn
    at_target_B = torch.rand(batch, device=table.device) < 0.5
    share_B = torch.where(at_target_B, float("nan") if target is None else target, drawn_B)
    threshold_B1 = torch.where(share_B.isnan()[:, None], 0.0, threshold_at(share_B.nan_to_num(1.0), table, paid))
    return LayerThreshold("learned", threshold_B1), share_B


class ScoredHeads(HeadAllocator):
    """Keeps the heads whose score passes the threshold, at weight 1.

    The gradient is that of a sigmoid around the threshold (straight-through). Scores begin in the order of heads, the
    layers taking turns, so that no two heads of a model have the same; those that are to `keep` are far above others.
    """

    ranks_layers = True

    def __init__(
        self, num_heads: int, *, layer: float = 0, layers: int = 1, renormalize: bool = False, learn: bool = True,
        keep: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(num_heads)
        self.renormalize = renormalize
        self.first_score = ALWAYS if keep else 0.0  # the lowest that a unit begins with
        places = 1 - (torch.arange(num_heads) * layers + layer + 0.5) / (num_heads * layers)
        self.score = nn.Parameter(places + self.first_score, requires_grad=learn and not keep)

    @abstractmethod
    def scores(self, x_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        """The heads' scores for each sample. -> (B, H)."""

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Budget | None = None) -> Allocation:
        if not isinstance(dial, LayerThreshold):
            dial = resolve_budget(dial or Dial(), self.score[None], None)[0]
        mode, threshold, quota = dial
        with torch.autocast(x_BND.device.type, enabled=False):
            scores = self.scores(x_BND, mask_BN)
            active = scores > threshold
            if mode == "fixed":
                active = ranks(scores) < quota
            elif mode == "max":
                active = active & (ranks(scores) < quota)
            elif mode == "random":
                active = ranks(torch.randn_like(scores)) < active.sum(dim=-1, keepdim=True)
            indicator = active.float()
            if torch.is_grad_enabled():
                soft = ((scores - threshold) / _SOFTNESS).sigmoid()
                indicator = indicator + (soft - soft.detach())
            weights = indicator
            if self.renormalize:
                weights = indicator * (self.num_heads / active.sum(dim=-1, keepdim=True).clamp(min=1))
            relevance = F.softmax(scores / _SOFTNESS, dim=-1)
            return Allocation(indicator.mean(dim=-1), relevance, active.sum(dim=-1), active, weights)


class OrderedHeads(ScoredHeads):
    """The static scores alone: at one threshold every input gets the same heads."""

    per_input = False

    def scores(self, x_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        return self.score.float().expand(len(x_BND), -1)


class RankedHeads(ScoredHeads):
    """Static scores plus what the input adds.

    That starts at zero and is computed from the input's difference to `centre`, the mean input, so that static scores
    stay the mean order.
    """

    has_scorer = True

    def __init__(self, num_heads: int, width: int, **options: Any) -> None:
        super().__init__(num_heads, **options)
        self.input_sum: Tensor | None = None  # of pooled training inputs, and their number
        self.scorer = Linear32(width, num_heads, bias=False)
        nn.init.zeros_(self.scorer.weight)
        self.centre: Tensor
        self.scale: Tensor
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("scale", torch.ones(()))

    def scores(self, x_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        pooled_BD = pool(x_BND, mask_BN)
        if self.training:
            batch = torch.cat([pooled_BD.detach().sum(dim=0), pooled_BD.new_tensor([len(pooled_BD)])])
            self.input_sum = batch if self.input_sum is None else self.input_sum + batch
        return self.scores_at(pooled_BD)

    def scores_at(self, pooled_BD: Tensor) -> Tensor:
        """The scores of inputs that are pooled already. -> (B, H)."""
        added: Tensor = self.scorer((pooled_BD - self.centre.float()) / self.scale.float())
        return self.score.float() + added

    def update_centre(self, total: Callable[[Tensor], Tensor] = lambda local: local) -> None:
        """Move `centre` towards the inputs seen since the last call: it drifts as the layers below learn.

        For a training loop, once per step; `total` sums over processes.
        """
        if self.input_sum is not None:
            seen = total(self.input_sum)
            self.centre.lerp_((seen[:-1] / seen[-1]).to(self.centre.dtype), _CENTRE_MOMENTUM)
            self.input_sum = None


class FrozenHeads(HeadAllocator):
    """The same heads for every input, chosen beforehand, unweighted; no parameters. The dial has nothing to turn."""

    can_dial = per_input = False

    def __init__(self, num_heads: int, heads: Sequence[int]) -> None:
        super().__init__(num_heads)
        if wrong := [h for h in heads if not 0 <= h < num_heads]:
            raise UsageError(f"head {wrong[0]} does not exist: heads are 0 to {num_heads - 1}")
        self.heads = sorted(set(heads))

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Budget | None = None) -> Allocation:
        active = torch.zeros(len(x_BND), self.num_heads, dtype=torch.bool, device=x_BND.device)
        active[:, self.heads] = True
        relevance = active.float() / max(1, len(self.heads))
        return Allocation(active.float().mean(dim=-1), relevance, active.sum(dim=-1), active, None)
