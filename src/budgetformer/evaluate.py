"""A model on a split -> one Evaluation: how right it was, which heads it used, what that cost.

The JSON keys are documented in docs/json.md and stable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from budgetformer.cost.flops import Shape, count
from budgetformer.cost.paper import attention_flops
from budgetformer.data import Encoded, collate, eval_plan
from budgetformer.models.model import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.nn.allocation import Dial
from budgetformer.nn.objective import relevance_entropy

Floats = NDArray[np.float32]
_Z95 = 1.959963984540054


@dataclass(frozen=True, eq=False)
class Outcome:
    """What the model did, row by row in the split's order. R rows, C outputs, L layers."""

    logits: Floats  # (R, C)
    losses: Floats  # (R,) the task's loss
    budget: Floats  # (R, L) predicted s
    heads: NDArray[np.int16]  # (R, L) executed k
    entropy: Floats  # (R, L) of p, in nats


@dataclass(frozen=True)
class Evaluation:
    """The result of one model on one split at one dial, ready for JSON."""

    split: str
    rows: int
    dial: str
    task: str
    metric: str  # the name of the figure that training maximises
    score: float
    quality: dict[str, Any]
    budget: dict[str, Any]
    cost: dict[str, Any]
    hardest: list[dict[str, Any]] = field(default_factory=list)


def eval_tokens(device: torch.device) -> int:
    """Padded tokens of one batch: about what a CPU's caches hold, many more for a GPU."""
    return 4096 if device.type == "cpu" else 65536


def run_model(
    model: BudgetFormerForSequenceClassification,
    encoded: Encoded,
    dial: Dial | str | None = None,
    *,
    progress: float | None = None,
    token_budget: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> Outcome:
    """Run the model over a split, shortest rows first, and put the results back in order.

    `share` (i, n) runs every n-th batch from the i-th on; the other rows stay zero.
    """
    was_training = model.training
    model.train(False)
    rows, layers = len(encoded), model.config.num_hidden_layers
    logits = np.zeros((rows, model.config.labels), np.float32)
    losses = np.zeros(rows, np.float32)
    budget, entropy = np.zeros((rows, layers), np.float32), np.zeros((rows, layers), np.float32)
    heads = np.zeros((rows, layers), np.int16)
    token_budget = max(token_budget or eval_tokens(model.device), int(encoded.lengths.max(initial=1)))
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode():
        torch.manual_seed(0)  # random heads are the same at every evaluation, and training's numbers are left alone
        for chosen in eval_plan(encoded.lengths, token_budget=token_budget)[share[0] :: share[1]]:
            batch = collate(encoded, chosen, model.config.pad_token_id or 0).to(model.device)
            types = batch.token_type_ids
            out = model(batch.input_ids, batch.attention_mask, token_type_ids=types, progress=progress, budget=dial)
            logits[chosen] = out.logits.float().cpu().numpy()
            losses[chosen] = _row_losses(out.logits.float(), batch.labels, model.config).cpu().numpy()
            layered = out.allocations
            budget[chosen] = torch.stack([a.budget for a in layered], 1).cpu().numpy()
            entropy[chosen] = torch.stack([relevance_entropy(a.relevance) for a in layered], 1).cpu().numpy()
            heads[chosen] = torch.stack([a.active.sum(-1) for a in layered], 1).cpu().numpy()
    model.train(was_training)
    return Outcome(logits, losses, budget, heads, entropy)


def _row_losses(logits: torch.Tensor, labels: torch.Tensor, config: BudgetFormerConfig) -> torch.Tensor:
    if config.task == "regression":
        return (logits.reshape(labels.shape) - labels).square()
    if config.task == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(-1)
    return F.cross_entropy(logits, labels, reduction="none")


def summarize(
    outcome: Outcome, encoded: Encoded, config: BudgetFormerConfig, *, split: str, dial: str, hardest: int = 0
) -> Evaluation:
    """Turn what happened row by row into figures."""
    names = config.label_names
    metric, score, quality = _quality(outcome, encoded.labels, config.task, names)
    quality["loss"] = float(outcome.losses.mean())
    worst = np.argsort(-outcome.losses, kind="stable")[:hardest]
    return Evaluation(
        split=split,
        rows=len(encoded),
        dial=dial,
        task=config.task,
        metric=metric,
        score=score,
        quality=quality,
        budget=_budget(outcome, encoded, config, names),
        cost=cost_of(outcome.heads, outcome.budget, encoded.lengths, config),
        hardest=[
            {
                "row": int(r),
                "line": int(encoded.lines[r]),
                "loss": float(outcome.losses[r]),
                **_answer(outcome.logits[r], encoded.labels[r], config.task, names),
            }
            for r in worst
        ],
    )


def evaluate(
    model: BudgetFormerForSequenceClassification,
    encoded: Encoded,
    *,
    split: str,
    dial: Dial | str | None = None,
    progress: float | None = None,
    hardest: int = 0,
) -> Evaluation:
    """Run and summarise in one call."""
    outcome = run_model(model, encoded, dial, progress=progress)
    return summarize(outcome, encoded, model.config, split=split, dial=str(Dial.parse(dial)), hardest=hardest)


def _answer(logits: Floats, label: Any, task: str, names: list[str]) -> dict[str, Any]:
    if task == "regression":
        return {"label": float(label), "predicted": float(logits[0])}
    if task == "multi_label_classification":
        return {
            "label": [names[i] for i in np.flatnonzero(label)],
            "predicted": [names[i] for i in np.flatnonzero(logits > 0)],
        }
    return {"label": names[int(label)], "predicted": names[int(logits.argmax())]}


def wilson(successes: int, trials: int, z: float = _Z95) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion."""
    if trials == 0:
        return 0.0, 1.0
    p, denominator = successes / trials, 1 + z * z / trials
    centre = (p + z * z / (2 * trials)) / denominator
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


def _proportion(successes: int, trials: int) -> dict[str, float]:
    low, high = wilson(successes, trials)
    return {"value": successes / max(1, trials), "low": low, "high": high}


def _quality(outcome: Outcome, labels: NDArray[Any], task: str, names: list[str]) -> tuple[str, float, dict[str, Any]]:
    if task == "regression":
        return _regression_quality(outcome.logits[:, 0], labels.astype(np.float64))
    if task == "multi_label_classification":
        return _multi_label_quality(outcome.logits > 0, labels.astype(bool), names)
    predicted = outcome.logits.argmax(1)
    C = outcome.logits.shape[1]
    confusion = np.bincount(labels.astype(np.int64) * C + predicted, minlength=C * C).reshape(C, C)
    accuracy = _proportion(int(np.trace(confusion)), len(labels))
    classes = _per_class(np.diag(confusion), confusion.sum(0), confusion.sum(1), names)
    present = [c["f1"] for c in classes if c["rows"]]
    quality = {
        "accuracy": accuracy,
        "macro_f1": float(np.mean(present)) if present else 0.0,
        "per_class": classes,
        "labels": names,
        "confusion": confusion.tolist(),
    }
    return "accuracy", accuracy["value"], quality


def _per_class(
    hits: NDArray[Any], predicted: NDArray[Any], actual: NDArray[Any], names: list[str]
) -> list[dict[str, Any]]:
    precision, recall = hits / np.maximum(1, predicted), hits / np.maximum(1, actual)
    f1 = 2 * hits / np.maximum(1, predicted + actual)
    return [
        {
            "label": name,
            "rows": int(actual[i]),
            "precision": float(precision[i]),
            "recall": float(recall[i]),
            "f1": float(f1[i]),
        }
        for i, name in enumerate(names)
    ]


def _multi_label_quality(
    predicted: NDArray[np.bool_], actual: NDArray[np.bool_], names: list[str]
) -> tuple[str, float, dict[str, Any]]:
    classes = _per_class((predicted & actual).sum(0), predicted.sum(0), actual.sum(0), names)
    micro = 2 * (predicted & actual).sum() / max(1, predicted.sum() + actual.sum())
    quality = {
        "micro_f1": float(micro),
        "macro_f1": float(np.mean([c["f1"] for c in classes])),
        "exact_match": _proportion(int((predicted == actual).all(1).sum()), len(actual)),
        "per_class": classes,
        "labels": names,
    }
    return "micro_f1", float(micro), quality


def _regression_quality(predicted: Floats, actual: NDArray[np.float64]) -> tuple[str, float, dict[str, Any]]:
    errors = predicted.astype(np.float64) - actual
    squared = errors**2
    half = _Z95 * float(squared.std(ddof=1)) / math.sqrt(len(errors)) if len(errors) > 1 else float("inf")
    spread = float(((actual - actual.mean()) ** 2).mean())
    mse = float(squared.mean())
    r2 = 1 - mse / spread if spread else 0.0
    quality = {
        "mse": {"value": mse, "low": max(0.0, mse - half), "high": mse + half},
        "mae": float(np.abs(errors).mean()),
        "r2": r2,
    }
    return "r2", r2, quality


def _means(values: NDArray[Any]) -> list[float]:
    return [float(v) for v in values.mean(0, dtype=np.float64)]


def _budget(outcome: Outcome, encoded: Encoded, config: BudgetFormerConfig, names: list[str]) -> dict[str, Any]:
    H = config.num_attention_heads
    share = outcome.heads / H
    result: dict[str, Any] = {
        "heads": H,
        "s_mean": float(outcome.budget.mean(dtype=np.float64)),
        "s_per_layer": _means(outcome.budget),
        "s_std_per_layer": [float(v) for v in outcome.budget.std(0, dtype=np.float64)],
        "k_over_h": float(share.mean()),
        "k_over_h_per_layer": _means(share),
        "entropy_per_layer": _means(outcome.entropy),
    }
    if config.task == "single_label_classification":
        result["by_class"] = [
            {
                "label": name,
                "rows": int((mine := encoded.labels == i).sum()),
                "s_per_layer": _means(outcome.budget[mine]) if mine.any() else [],
                "k_over_h_per_layer": _means(share[mine]) if mine.any() else [],
            }
            for i, name in enumerate(names)
        ]
    return result


def model_shape(config: BudgetFormerConfig) -> Shape:
    """The sizes of a config that FLOPs depend on."""
    return Shape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        width=config.hidden_size,
        inner=config.intermediate_size,
        labels=config.labels,
        vocab=config.vocab_size,
        budget_net=config.allocator in ("learned", "random"),
        scorer=config.allocator in ("learned", "fixed", "ranked"),
    )


def cost_of(heads: NDArray[Any], budget: Floats, lengths: NDArray[Any], config: BudgetFormerConfig) -> dict[str, Any]:
    """Mean FLOPs a text: whole model, executed heads, real lengths; and the paper's own count at the same lengths."""
    shape = model_shape(config)
    plain = config.allocator == "all"
    totals = {"selective": 0.0, "paper_style": 0.0, "dense": 0.0, "attention": 0.0, "attention_dense": 0.0}
    for n, rows, k in _by_length(lengths, heads):
        ours = count(shape, n, k, "dense" if plain else "selective")
        dense = count(shape, n, k, "dense")
        totals["selective"] += rows * ours.total
        totals["paper_style"] += rows * count(shape, n, k, "dense" if plain else "paper").total
        totals["dense"] += rows * dense.total
        totals["attention"] += rows * (ours.attention + ours.gates)
        totals["attention_dense"] += rows * dense.attention
    rows = max(1, len(lengths))
    mean_s = budget.mean(1)
    paper = sum(
        attention_flops(int(n), float(s), gated=not plain, shape=shape) for n, s in zip(lengths, mean_s, strict=True)
    )
    return {
        "flops_per_text": totals["selective"] / rows,
        "flops_per_text_dense": totals["dense"] / rows,
        "flops_ratio": totals["selective"] / max(1.0, totals["dense"]),
        "flops_per_text_paper_style": totals["paper_style"] / rows,
        "attention_flops_ratio": totals["attention"] / max(1.0, totals["attention_dense"]),
        "attention_share_of_dense": totals["attention_dense"] / max(1.0, totals["dense"]),
        "papers_count_per_text": paper / rows,
        "mean_tokens": float(lengths.mean()) if len(lengths) else 0.0,
    }


def _by_length(lengths: NDArray[Any], heads: NDArray[Any]) -> list[tuple[int, int, list[float]]]:
    """For each length: the number of rows and their mean heads in each layer."""
    values, inverse, rows = np.unique(lengths, return_inverse=True, return_counts=True)
    sums = np.zeros((len(values), heads.shape[1]))
    np.add.at(sums, inverse, heads)
    return [(int(n), int(r), list(s / r)) for n, r, s in zip(values, rows, sums, strict=True)]


def mcnemar(ours: Sequence[bool] | NDArray[Any], theirs: Sequence[bool] | NDArray[Any]) -> dict[str, Any]:
    """The exact paired test on rows that exactly one of two models gets right, with a verdict in plain words."""
    a, b = np.asarray(ours, bool), np.asarray(theirs, bool)
    only_ours, only_theirs = int((a & ~b).sum()), int((~a & b).sum())
    n, k = only_ours + only_theirs, min(only_ours, only_theirs)
    p = min(1.0, 2 * _binomial_tail(k, n)) if n else 1.0
    difference = float(a.mean() - b.mean()) if len(a) else 0.0
    points = f"{100 * abs(difference):.2f} points"
    if p >= 0.05:
        verdict = f"not significantly different from the dense twin ({100 * difference:+.2f} points, p = {p:.2g})"
    else:
        verdict = f"{'better' if difference > 0 else 'worse'} than the dense twin by {points} (p = {p:.2g})"
    return {
        "only_ours_right": only_ours,
        "only_baseline_right": only_theirs,
        "difference": difference,
        "p_value": p,
        "verdict": verdict,
    }


def _binomial_tail(k: int, n: int) -> float:
    """P(X <= k) for X ~ Binomial(n, 1/2)."""
    logs = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2) for i in range(k + 1)]
    top = max(logs)
    return math.exp(top) * sum(math.exp(v - top) for v in logs)


def right(outcome: Outcome, encoded: Encoded, task: str) -> NDArray[np.bool_] | None:
    """Which rows were answered right; None where right and wrong is not the question (regression)."""
    if task == "regression":
        return None
    if task == "multi_label_classification":
        return np.asarray(((outcome.logits > 0) == encoded.labels.astype(bool)).all(1))
    return np.asarray(outcome.logits.argmax(1) == encoded.labels)
