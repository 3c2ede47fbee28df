"""Heads ranked across the layers of a model: one order for all of them, from which an input may depart.

Every head has a static score, comparable between layers, and what the input adds to it. A cut is a threshold on the
scores: heads above it run at their full weight, so a layer may get none. Cutting the static scores at the right place
keeps any wanted share of all heads.

Shapes: B samples, N tokens, D model width, H heads. `mask` is padding: True on real tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budgetformer.errors import UsageError
from budgetformer.nn.allocation import (
    ROUNDING_SLACK,
    Allocation,
    Dial,
    HeadAllocator,
    _Linear32,
    pool,
    ranks,
)

# How far from the cut a head still feels a gradient; static scores begin evenly spread over (0, 1).
_SOFTNESS = 0.1
_DRIFT = 0.05  # how far a step of training moves the mean input


@dataclass(frozen=True, eq=False)
class Cut(Dial):
    """A dial made out for one layer, given the static scores of all."""

    threshold: Tensor | float = float("-inf")  # a number, or (B, 1)
    quota: int = 0  # for fixed and max: the heads of this layer that the static order keeps


Shifts = Sequence[tuple[int, float]]  # at so many heads of all layers, how far the threshold is moved


def thresholds(scores_LH: Tensor, shifts: Shifts | None = None) -> Tensor:
    """Entry k is the threshold that keeps the k highest of all static scores. -> (heads of all layers + 1,).

    `shifts` move the thresholds, in between linearly, where inputs depart from the static scores.
    """
    falling = scores_LH.detach().float().flatten().sort(descending=True).values
    ends = falling.new_tensor([float("inf"), float("-inf")])
    table = torch.cat([ends[:1], (falling[1:] + falling[:-1]) / 2, ends[1:]])
    if shifts:
        at, by = table.new_tensor(shifts).T.contiguous()
        places = torch.arange(len(table), device=table.device, dtype=table.dtype)
        right = torch.searchsorted(at, places).clamp(max=len(at) - 1)
        left = (right - 1).clamp(min=0)
        way = ((places - at[left]) / (at[right] - at[left]).clamp(min=1)).clamp(0, 1)
        table = (table + by[left].lerp(by[right], way)).cummin(dim=0).values  # more heads, never a higher threshold
    return table


def threshold_at(share_B: Tensor, table: Tensor) -> Tensor:
    """The threshold that keeps this share of all heads by their static scores. (B,) -> (B, 1)."""
    return table[(share_B * (len(table) - 1) + ROUNDING_SLACK).long()][:, None]


def make_cuts(dial: Dial, scores_LH: Tensor, learned: float | None, shifts: Shifts | None = None) -> list[Cut]:
    """The dial made out for each layer. `learned` is the share that `learned` keeps; None: scores above 0.

    `mean` cuts all layers at one threshold: the share is a mean over inputs. `fixed` and `max` give each layer the
    number that the static order gives it, to every input or as a ceiling: a layer may get fewer than its gate asks.
    """
    table = thresholds(scores_LH, shifts)
    shares = torch.tensor([1.0 if learned is None else learned, 1.0 if dial.value is None else dial.value])
    own, limit = threshold_at(shares.to(table.device), table)[:, 0].tolist()
    own = 0.0 if learned is None else own
    threshold = {"full": float("-inf"), "learned": own, "random": own, "max": own}.get(dial.mode, limit)
    if dial.mode in ("fixed", "max"):  # they count heads, by the static order
        limit = float(threshold_at(shares[1:].to(table.device), thresholds(scores_LH)))
        return [Cut(dial.mode, dial.value, threshold, quota) for quota in (scores_LH > limit).sum(dim=1).tolist()]
    return [Cut(dial.mode, dial.value, threshold)] * len(scores_LH)


class RankedHeads(HeadAllocator):
    """Keeps the heads whose score passes the cut, at weight 1. With `per_input` the input adds to the scores.

    The gradient is that of a sigmoid around the cut (straight-through). What the input adds starts at zero and is
    computed from its difference to `centre`, the mean input, so that static scores stay the mean order.
    """

    def __init__(self, num_heads: int, width: int, *, per_input: bool = True, renormalize: bool = False) -> None:
        super().__init__(num_heads)
        self.renormalize = renormalize  # spread the dropped heads' weight over the kept ones
        self.seen: Tensor | None = None  # the sum of pooled training inputs, and their number
        self.score = nn.Parameter(torch.linspace(0.9, 0.1, num_heads))
        self.scorer = _Linear32(width, num_heads, bias=False) if per_input else None
        if self.scorer is not None:
            nn.init.zeros_(self.scorer.weight)
            self.centre: Tensor
            self.scale: Tensor
            self.register_buffer("centre", torch.zeros(width))
            self.register_buffer("scale", torch.ones(()))

    def scores(self, x_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Static scores plus what the input adds. -> (B, H)."""
        if self.scorer is None:
            return self.score.float().expand(len(x_BND), -1)
        pooled_BD = pool(x_BND, mask_BN)
        if self.training:
            mine = torch.cat([pooled_BD.detach().sum(dim=0), pooled_BD.new_tensor([len(pooled_BD)])])
            self.seen = mine if self.seen is None else self.seen + mine
        return self.scores_at(pooled_BD)

    def follow(self, total: Callable[[Tensor], Tensor] = lambda mine: mine) -> None:
        """Move `centre` towards the inputs seen since the last call: it drifts as the layers below learn.

        For a training loop, once a step; `total` sums over processes.
        """
        if self.seen is not None:
            seen = total(self.seen)
            self.centre.lerp_((seen[:-1] / seen[-1]).to(self.centre.dtype), _DRIFT)
            self.seen = None

    def scores_at(self, pooled_BD: Tensor) -> Tensor:
        """The scores of inputs that are pooled already. -> (B, H)."""
        assert self.scorer is not None
        added: Tensor = self.scorer((pooled_BD - self.centre.float()) / self.scale.float())
        return self.score.float() + added

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Dial | None = None) -> Allocation:
        cut = dial if isinstance(dial, Cut) else make_cuts(dial or Dial(), self.score[None], None)[0]
        with torch.autocast(x_BND.device.type, enabled=False):
            scores = self.scores(x_BND, mask_BN)
            active = scores > cut.threshold
            if cut.mode == "fixed":
                active = ranks(scores) < cut.quota
            elif cut.mode == "max":
                active = active & (ranks(scores) < cut.quota)
            elif cut.mode == "random":
                active = ranks(torch.randn_like(scores)) < active.sum(dim=-1, keepdim=True)
            kept = active.float()
            if torch.is_grad_enabled():
                soft = ((scores - cut.threshold) / _SOFTNESS).sigmoid()
                kept = kept + (soft - soft.detach())
            weights = kept
            if self.renormalize:
                weights = kept * (self.num_heads / active.sum(dim=-1, keepdim=True).clamp(min=1))
            relevance = F.softmax(scores / _SOFTNESS, dim=-1)
            return Allocation(kept.mean(dim=-1), relevance, active.sum(dim=-1), active, weights)


class GivenHeads(HeadAllocator):
    """The same heads for every input, chosen beforehand; no parameters. The dial has nothing to turn."""

    def __init__(self, num_heads: int, kept: Sequence[int]) -> None:
        super().__init__(num_heads)
        if wrong := [h for h in kept if not 0 <= h < num_heads]:
            raise UsageError(f"head {wrong[0]} does not exist: heads are 0 to {num_heads - 1}")
        self.kept = sorted(set(kept))

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Dial | None = None) -> Allocation:
        active = torch.zeros(x_BND.shape[0], self.num_heads, dtype=torch.bool, device=x_BND.device)
        active[:, self.kept] = True
        relevance = active.float() / max(1, len(self.kept))
        return Allocation(active.float().mean(dim=-1), relevance, active.sum(dim=-1), active, None)
