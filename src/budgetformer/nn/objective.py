"""What is minimised: the task loss, the budget's hinge, the relevance entropy, and the prices that are ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from budgetformer.errors import UsageError
from budgetformer.nn.allocation import Allocation
from budgetformer.nn.ranking import RankingOptions

Task = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True)
class Objective:
    """The options of the loss beside the task's own. Per-sample terms are averaged over batch and layers."""

    s_min: float = 0.1
    s_max: float = 0.9
    alpha_base: float = 0.001
    alpha_max: float = 0.05
    entropy: Literal["intended", "printed", "off"] = "intended"
    cost_weight: float = 0.0  # a price on compute: this times the mean of s
    target_budget: float | Sequence[float] | None = None  # a mean budget to reach, one for all layers or one each
    target_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.s_min <= self.s_max <= 1:
            raise UsageError(f"s_min={self.s_min}, s_max={self.s_max}: give 0 <= s_min <= s_max <= 1")
        if self.entropy not in ("intended", "printed", "off"):
            raise UsageError(f"entropy={self.entropy!r}: give intended, printed or off")
        for name in ("alpha_base", "alpha_max", "cost_weight", "target_weight"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)}: give a number that is not negative")
        targets = self.target_budget if isinstance(self.target_budget, Sequence) else [self.target_budget or 0.0]
        if not all(0 <= target <= 1 for target in targets):
            raise UsageError(f"target_budget={self.target_budget}: give fractions of the heads, in [0, 1]")

    def targets(self, layers: int) -> list[float] | None:
        """The target budget of each layer, or None where there is no target."""
        if self.target_budget is None:
            return None
        if not isinstance(self.target_budget, Sequence):
            return [self.target_budget] * layers
        if len(self.target_budget) != layers:
            raise UsageError(
                f"target_budget has {len(self.target_budget)} values for {layers} layers: give one number, "
                "or one for each layer"
            )
        return list(self.target_budget)


def violation(budget: Tensor, s_min: float, s_max: float) -> Tensor:
    """v(s) = max(0, s_min - s) + max(0, s - s_max)."""
    return F.relu(s_min - budget) + F.relu(budget - s_max)


def budget_penalty(budget: Tensor, objective: Objective) -> Tensor:
    """alpha(s) v(s)^2 with alpha(s) = min(alpha_max, alpha_base + v(s)); the gradient flows through alpha."""
    v = violation(budget, objective.s_min, objective.s_max)
    return (objective.alpha_base + v).clamp(max=objective.alpha_max) * v**2


def relevance_entropy(relevance: Tensor) -> Tensor:
    """-sum p log p over heads, in nats. (..., H) -> (...)."""
    tiny = torch.finfo(relevance.dtype).tiny
    return -(relevance * relevance.clamp_min(tiny).log()).sum(dim=-1)


def entropy_loss(relevance: Tensor, beta: float, objective: Objective) -> Tensor:
    """beta(t) times the entropy (intended: high early, low late) or times sum p log p (as printed: the reverse)."""
    sign = {"intended": 1.0, "printed": -1.0, "off": 0.0}[objective.entropy]
    return sign * beta * relevance_entropy(relevance)


def task_loss(
    logits: Tensor,
    labels: Tensor,
    task: Task,
    *,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy, binary cross-entropy (multi-label) or mean squared error (regression), averaged over samples."""
    logits = logits.float()
    if task == "regression":
        return F.mse_loss(logits.reshape(labels.shape), labels.float())
    if task == "multi_label_classification":
        target = labels.float() * (1 - label_smoothing) + label_smoothing / 2
        return F.binary_cross_entropy_with_logits(logits, target, pos_weight=class_weights)
    losses = F.cross_entropy(logits, labels, weight=class_weights, label_smoothing=label_smoothing, reduction="none")
    return losses.mean()


def allocation_losses(allocations: Sequence[Allocation], objective: Objective, beta: float) -> dict[str, Tensor]:
    """The parts of the loss that concern heads, by name. Empty where no layer has gates."""
    gated = [a for a in allocations if a.weights is not None]
    if not gated:
        return {}
    budget_LB = torch.stack([a.budget for a in gated])
    relevance_LBH = torch.stack([a.relevance for a in gated])
    parts = {
        "budget": budget_penalty(budget_LB, objective).mean(),
        "entropy": entropy_loss(relevance_LBH, beta, objective).mean(),
    }
    if objective.cost_weight:
        parts["cost"] = objective.cost_weight * budget_LB.mean()
    if (targets := objective.targets(len(gated))) is not None:
        gap_L = _mean_over_processes(budget_LB) - budget_LB.new_tensor(targets)
        parts["target"] = objective.target_weight * (gap_L**2).mean()
    return parts


def ranked_losses(
    allocations: Sequence[Allocation],
    share_B: Tensor,
    flops_B: Tensor,
    options: RankingOptions,
    progress: float,
    groups_price: float = 0.0,
) -> dict[str, Tensor]:
    """What holds ranked units to the shares that were asked for (NaN: to none), and the price on executed FLOPs.

    Samples at the target may make up for each other, as it is a mean over inputs; those at a drawn share may not.
    `flops_B` are those of one layer with all its units, of which its groups of neurons cost the share `groups_price`.
    """
    executed_B = torch.stack([a.budget for a in allocations]).mean(dim=0)
    if groups := [a.groups.mean(dim=1) for a in allocations if a.groups is not None]:
        executed_B = executed_B.lerp(torch.stack(groups).mean(dim=0), groups_price)
    gap_B, target = executed_B - share_B, options.target(progress)
    at_target_B = share_B == (float("nan") if target is None else target)
    squares = gap_B[~at_target_B & ~share_B.isnan()].square().sum()
    if target is not None:
        squares = squares + at_target_B.sum() * _mean_over_processes(gap_B[at_target_B]) ** 2
    parts = {"target": options.target_weight * squares / len(gap_B)}
    if options.cost_weight:
        price = options.cost_weight * (executed_B * flops_B).sum() / flops_B.sum()
        parts["cost"] = price * (flops_B.mean() / _mean_over_processes(flops_B))
    return parts


def distillation_loss(logits: Tensor, teacher_logits: Tensor, task: Task, temperature: float) -> Tensor:
    """The distance to a teacher's answers: T^2 KL at temperature T, binary cross-entropy, or mean squared error."""
    logits, teacher, T = logits.float(), teacher_logits.float(), temperature
    if task == "regression":
        return F.mse_loss(logits, teacher)
    if task == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, teacher.sigmoid())
    target = F.log_softmax(teacher / T, dim=-1)
    return T * T * F.kl_div(F.log_softmax(logits / T, dim=-1), target, log_target=True, reduction="batchmean")


def hidden_state_distance(states: Sequence[Tensor], teacher: Sequence[Tensor], mask_BN: Tensor | None) -> Tensor:
    """The squared distance to a teacher's states on real tokens, as a share of the teacher's own: mean of texts."""
    shares = []
    for a_BND, b_BND in zip(states, teacher, strict=True):
        squares = torch.stack([(a_BND.float() - b_BND.float()).square(), b_BND.float().square()]).sum(dim=-1)
        apart_B, size_B = (squares if mask_BN is None else squares * mask_BN).sum(dim=-1)
        shares.append((apart_B / size_B).mean())
    return torch.stack(shares).mean()


def _mean_over_processes(values: Tensor) -> Tensor:
    """The mean over the samples of all processes that train together; the gradient is this process's own. (..., B)."""
    count = values.shape[-1]
    mean = values.mean(dim=-1) if count else values.sum(dim=-1)
    if not (torch.is_grad_enabled() and dist.is_available() and dist.is_initialized()):
        return mean
    sums = torch.cat([values.detach().sum(dim=-1).reshape(-1), values.new_tensor([count])])
    dist.all_reduce(sums)
    return mean + ((sums[:-1] / sums[-1].clamp(min=1)).reshape(mean.shape) - mean).detach()
