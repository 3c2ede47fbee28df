"""Scores of a labelled table -> one Evaluation: how right the model was, which heads it used, what that cost.

The JSON keys are documented in docs/json.md and stable. Shapes: R rows, C outputs, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.cost.flops import count, papers_count
from budgetformer.data.dataset import Split
from budgetformer.data.tokens import TokenTable
from budgetformer.dial import Dial
from budgetformer.engine.answers import named, predicted
from budgetformer.engine.scores import Engine, Floats, Scores, executed_flops, score
from budgetformer.spec import ModelSpec

_BINS = 15  # of probabilities
_AS_GOOD = 0.005  # a difference in the share of right answers that nobody minds
_FEW_ROWS = 20_000  # below which layers from scratch have little to learn from
_HOTTEST = 20.0  # a temperature is at most this, and at least one part of it
CHEAPER = "0.3"  # the budget that a comparison shows beside a learned one that costs more
Z95 = 1.959963984540054  # standard deviations to either side that hold 95 % of a normal distribution


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
    exits: dict[str, Any] | None = None  # of a model with exits: its stages, who left where and how well
    hardest: list[dict[str, Any]] = field(default_factory=list)

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """The 95 % interval of the score, where its metric has one."""
        bounds = self.quality.get(self.metric)
        return (bounds["low"], bounds["high"]) if isinstance(bounds, dict) else (None, None)


def row_losses(scores: Scores) -> Floats:
    """The task's loss of each row. (R,)."""
    import torch
    from torch.nn import functional as F

    logits, labels = torch.from_numpy(scores.logits), torch.from_numpy(np.array(_labels(scores.table)))
    if scores.task == "regression":
        losses = (logits.reshape(labels.shape) - labels).square()
    elif scores.task == "multi_label_classification":
        losses = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(-1)
    else:
        losses = F.cross_entropy(logits, labels.long(), reduction="none")
    out: Floats = losses.numpy()
    return out


def _labels(table: TokenTable) -> NDArray[Any]:
    assert table.labels is not None, "an evaluation needs labels"
    return table.labels


def summarize(scores: Scores, config: ModelSpec, *, split: str, dial: str, hardest: int = 0) -> Evaluation:
    """Turn what happened row by row into figures."""
    table, names, losses = scores.table, config.label_names, row_losses(scores)
    metric, value, quality = _quality(scores, names)
    quality["loss"] = float(losses.mean())
    if config.task != "regression":
        scale = config.stages.temperatures[-1 if scores.exits is None else scores.exits, None]
        before = replace(scores, logits=scores.logits * scale)
        errors = {"error": calibration_error(scores), "error_before": calibration_error(before)}
        quality["calibration"] = {**errors, "temperatures": config.temperatures}
    return Evaluation(
        split=split,
        rows=len(table),
        dial=dial,
        task=config.task,
        metric=metric,
        score=value,
        quality=quality,
        budget=_budget(scores, names) | _groups(scores, config),
        cost=cost_of(scores, config),
        exits=_exits(scores, config),
        hardest=_hardest(scores, losses, names, hardest),
    )


def calibration_error(scores: Scores) -> float:
    """How far probabilities are from the share that is right, on average: the expected calibration error.

    Of the answered class, or of every label where there may be several; in bins of equal width.
    """
    chances, labels = scores.probabilities, _labels(scores.table)
    if scores.task == "multi_label_classification":
        sure, right = chances.ravel(), labels.ravel()
    else:
        sure, right = chances.max(1), chances.argmax(1) == labels
    bins = np.minimum((sure * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, weights=sure.astype(np.float64) - right, minlength=_BINS)
    return float(np.abs(gaps).sum() / max(1, len(sure)))


def fit_temperatures(scores: Scores) -> list[float]:
    """For each stage, the number that its logits are to be divided by for the labels to be likeliest; none for numbers.

    Answers stay as they are. A few rows cannot show that an answer is certain: as in Platt's scaling, a label counts as
    if every class had been seen once more.
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    if scores.task == "regression":
        return []
    labels, rows, multi = _labels(scores.table), len(scores.logits), scores.task == "multi_label_classification"
    classes = 2 if multi else scores.logits.shape[1]  # no or yes, for each label of several
    shares = (np.eye(classes)[labels.ravel()] * rows + 1) / (rows + classes)

    def loss(log_temperature: float, logits: NDArray[np.float64]) -> float:
        return float(-(shares * log_softmax(logits / math.exp(log_temperature), axis=1)).sum(axis=1).mean())

    temperatures, bounds = [], (-math.log(_HOTTEST), math.log(_HOTTEST))
    stages = scores.logits[:, None] if scores.stage_logits is None else scores.stage_logits
    for stage in np.moveaxis(stages.astype(np.float64), 1, 0):
        logits = np.stack([np.zeros(stage.size), stage.ravel()], axis=1) if multi else stage
        best = minimize_scalar(loss, args=(logits,), bounds=bounds, method="bounded").x
        temperatures.append(float(f"{math.exp(best):.4g}"))
    return temperatures


def _hardest(scores: Scores, losses: Floats, names: list[str], rows: int) -> list[dict[str, Any]]:
    """The rows with the highest loss, worst first."""
    worst = np.argsort(-losses, kind="stable")[:rows]
    labels = _labels(scores.table)[worst]
    if scores.task == "regression":
        actual: list[Any] = labels.tolist()
        answers: list[Any] = scores.logits[worst, 0].tolist()
    else:
        chosen = labels.astype(bool) if scores.task == "multi_label_classification" else labels
        actual = [[names[i] for i in np.flatnonzero(row)] if np.ndim(row) else names[row] for row in chosen]
        answers = named(scores.probabilities[worst], scores.task, names)
    lines, lost = scores.table.lines[worst], losses[worst]
    return [
        {"row": int(row), "line": int(line), "loss": float(loss), "label": label, "predicted": answer}
        for row, line, loss, label, answer in zip(worst, lines, lost, actual, answers, strict=True)
    ]


def evaluate(
    engine: Engine, table: TokenTable, *, split: str, dial: Dial | str | None = None, hardest: int = 0
) -> Evaluation:
    """Score and summarise in one call."""
    dial = Dial.parse(dial)
    return summarize(score(engine, table, dial), engine.config, split=split, dial=str(dial), hardest=hardest)


def with_texts(evaluation: Evaluation, split: Split) -> Evaluation:
    """The hardest rows with their texts."""
    examples = split.select([row["row"] for row in evaluation.hardest]).examples()
    texts = [{"file": e.file, "text": e.text, "text_pair": e.text_pair} for e in examples]
    return replace(evaluation, hardest=[{**row, **text} for row, text in zip(evaluation.hardest, texts, strict=True)])


def proportion(successes: int, trials: int) -> dict[str, float]:
    """A proportion with Wilson's 95 % interval."""
    from scipy.stats import binomtest

    if not trials:
        return {"value": 0.0, "low": 0.0, "high": 1.0}
    bounds = binomtest(successes, trials).proportion_ci(method="wilson")
    return {"value": successes / trials, "low": float(bounds.low), "high": float(bounds.high)}


def _quality(scores: Scores, names: list[str]) -> tuple[str, float, dict[str, Any]]:
    labels = _labels(scores.table)
    answers = predicted(scores.probabilities, scores.task)
    if scores.task == "regression":
        return _regression_quality(answers.astype(np.float64), labels.astype(np.float64))
    if scores.task == "multi_label_classification":
        return _multi_label_quality(answers, labels.astype(bool), names)
    from sklearn.metrics import confusion_matrix

    confusion = confusion_matrix(labels, answers, labels=np.arange(len(names)))
    accuracy = proportion(int(np.trace(confusion)), len(labels))
    classes = _per_class(labels, answers, names)
    present = [c["f1"] for c in classes if c["rows"]]
    quality = {
        "accuracy": accuracy,
        "macro_f1": float(np.mean(present)) if present else 0.0,
        "per_class": classes,
        "labels": names,
        "confusion": confusion.tolist(),
    }
    return "accuracy", accuracy["value"], quality


def _per_class(actual: NDArray[Any], answers: NDArray[Any], names: list[str]) -> list[dict[str, Any]]:
    from sklearn.metrics import precision_recall_fscore_support

    figures = precision_recall_fscore_support(actual, answers, labels=np.arange(len(names)), zero_division=0)
    return [
        {"label": name, "rows": int(rows), "precision": float(precision), "recall": float(recall), "f1": float(f1)}
        for name, precision, recall, f1, rows in zip(names, *figures, strict=True)
    ]


def _multi_label_quality(
    answers: NDArray[np.bool_], actual: NDArray[np.bool_], names: list[str]
) -> tuple[str, float, dict[str, Any]]:
    classes = _per_class(actual, answers, names)
    micro = 2 * (answers & actual).sum() / max(1, answers.sum() + actual.sum())
    quality = {
        "micro_f1": float(micro),
        "macro_f1": float(np.mean([c["f1"] for c in classes])),
        "exact_match": proportion(int((answers == actual).all(1).sum()), len(actual)),
        "per_class": classes,
        "labels": names,
    }
    return "micro_f1", float(micro), quality


def _regression_quality(answers: NDArray[np.float64], actual: NDArray[np.float64]) -> tuple[str, float, dict[str, Any]]:
    errors = answers - actual
    squared = errors**2
    half = Z95 * float(squared.std(ddof=1)) / math.sqrt(len(errors)) if len(errors) > 1 else float("inf")
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


def _budget(scores: Scores, names: list[str]) -> dict[str, Any]:
    share = scores.heads / scores.num_heads
    result: dict[str, Any] = {"heads": scores.num_heads}
    budget, entropy = scores.budget, scores.entropy
    if budget is not None:
        result |= {
            "s_mean": float(budget.mean(dtype=np.float64)),
            "s_per_layer": _means(budget),
            "s_std_per_layer": [float(v) for v in budget.std(0, dtype=np.float64)],
        }
    result |= {"k_over_h": float(share.mean()), "k_over_h_per_layer": _means(share)}
    heads = scores.heads_per_text.sum(1)
    result["heads_per_text"] = {"least": int(heads.min()), "most": int(heads.max())}
    if entropy is not None:
        result["entropy_per_layer"] = _means(entropy)
    if scores.task == "single_label_classification":
        result["by_class"] = [
            {
                "label": name,
                "rows": int((members := _labels(scores.table) == i).sum()),
                "s_per_layer": _means(budget[members]) if budget is not None and members.any() else [],
                "k_over_h_per_layer": _means(share[members]) if members.any() else [],
            }
            for i, name in enumerate(names)
        ]
    return result


def _groups(scores: Scores, config: ModelSpec) -> dict[str, Any]:
    """The share of groups of feed-forward neurons that ran, where they can be left out."""
    if scores.groups is None:
        return {}
    share = scores.groups / config.groups
    return {"groups": config.groups, "groups_run": float(share.mean()), "groups_run_per_layer": _means(share)}


def _exits(scores: Scores, config: ModelSpec) -> dict[str, Any] | None:
    """How many rows left at each stage, how many of them were answered right, and the layers that ran on average."""
    if scores.exits is None:
        return None
    stages, correct = config.stages, is_correct(scores)
    at = scores.exits[:, None] == np.arange(len(stages.depths))
    return {
        "stages": stages.names,
        "depths": stages.depths,
        "share": _means(at),
        "right": None if correct is None else [float(correct[here].mean()) if here.any() else None for here in at.T],
        "layers": float(np.array(stages.depths)[scores.exits].mean()) if len(scores.exits) else 0.0,
    }


def cost_of(scores: Scores, config: ModelSpec) -> dict[str, Any]:
    """Mean FLOPs per text: whole model, executed heads, real lengths; and the paper's own count at the same lengths."""
    shape, lengths, plain = config.shape, scores.table.lengths, not config.gate.selects
    dense = count(replace(shape, words=False), lengths, (), "dense")
    ours, paper_style, attention = (np.zeros(len(lengths)) for _ in range(3))
    for rows, flops in executed_flops(scores, config, "dense" if plain else "selective"):
        ours[rows], attention[rows] = flops.total, flops.attention + flops.gates
    for rows, flops in executed_flops(scores, config, "dense" if plain else "paper"):
        paper_style[rows] = flops.total
    texts = max(1, len(lengths))
    total, total_attention = max(1.0, np.sum(dense.total)), np.sum(dense.attention)
    result = {
        "flops_per_text": float(ours.sum() / texts),
        "flops_per_text_dense": float(np.sum(dense.total) / texts),
        "flops_ratio": float(ours.sum() / total),
        "flops_per_text_paper_style": float(paper_style.sum() / texts),
        "attention_flops_ratio": float(attention.sum() / max(1.0, total_attention)),
        "attention_share_of_dense": float(total_attention / total),
        "mean_tokens": float(lengths.mean()) if len(lengths) else 0.0,
    }
    if scores.budget is not None:
        s = scores.budget.mean(1)
        counts = papers_count(lengths, s.astype(np.float64), gated=not plain, shape=shape)
        result["papers_count_per_text"] = float(np.sum(counts) / texts)
    return result


def versus_twin(ours: Scores, twin: Scores, recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """The paired test of a run against its dense twin on the same rows; None where answers are not right or wrong."""
    a, b = is_correct(ours), is_correct(twin)
    if a is None or b is None:
        return None
    result = mcnemar(a, b)
    if recipe.get("base") is not None:
        more = f"{recipe['epochs']} more epoch{'s' * (recipe['epochs'] > 1)}"
        result["verdict"] += f"; it was trained on from the twin, for {more}"
    return result


def mcnemar(ours: Sequence[bool] | NDArray[Any], theirs: Sequence[bool] | NDArray[Any]) -> dict[str, Any]:
    """The exact paired test on rows that exactly one of two models gets right, with a verdict in plain words."""
    from scipy.stats import binomtest

    a, b = np.asarray(ours, bool), np.asarray(theirs, bool)
    only_ours, only_theirs = int((a & ~b).sum()), int((~a & b).sum())
    p = float(binomtest(only_ours, only_ours + only_theirs).pvalue) if only_ours + only_theirs else 1.0
    difference = float(a.mean() - b.mean()) if len(a) else 0.0
    points = f"{100 * abs(difference):.2f} points"
    if p >= 0.05:
        verdict = f"not significantly different from the dense twin ({100 * difference:+.2f} points, p = {p:.2g})"
    else:
        verdict = f"{'better' if difference > 0 else 'worse'} than the dense twin by {points} (p = {p:.2g})"
    rows = {"only_ours_right": only_ours, "only_baseline_right": only_theirs}
    return {**rows, "difference": difference, "p_value": p, "verdict": verdict}


def paired_difference(ours: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> dict[str, float]:
    """The difference in the share of right answers on the same rows, with its normal 95 % interval."""
    n, gain, loss = len(ours), int((ours & ~theirs).sum()), int((~ours & theirs).sum())
    value = (gain - loss) / n
    half = Z95 * math.sqrt(max(0.0, gain + loss - (gain - loss) ** 2 / n)) / n
    return {"value": value, "low": value - half, "high": value + half}


def is_correct(scores: Scores) -> NDArray[np.bool_] | None:
    """Which rows were answered right; None where right and wrong is not the question (regression)."""
    labels, answers = _labels(scores.table), predicted(scores.probabilities, scores.task)
    if scores.task == "regression":
        return None
    if scores.task == "multi_label_classification":
        return np.asarray((answers == labels.astype(bool)).all(1))
    return np.asarray(answers == labels)


def words_suffice(stages: Sequence[Mapping[str, Any]], twin: float | None = None) -> str | None:
    """What to say where the words alone (of a calibration's `stages`) are as good as everything; else None."""
    words = stages[0] if stages and stages[0]["layers"] == 0 else {}
    if not words.get("versus_full") or words["versus_full"]["low"] <= -_AS_GOOD:
        return None
    if twin is not None and twin - words["score"] > _AS_GOOD:
        return None
    return (
        f"these data do not need a Transformer: the words alone reach {words['score']:.4f}, the full model "
        f"{stages[-1]['score']:.4f}, which is no more than half a point above, if at all"
    )


def pretrained_hint(record: Mapping[str, Any]) -> str | None:
    """What to say of a run (its run.json) whose layers had to learn the language from a few rows."""
    rows = record["splits"]["train"]
    if record["recipe"].get("base") is not None or rows >= _FEW_ROWS:
        return None
    return (
        f"{rows:,} rows teach layers that start from nothing little more than the words say; a pretrained encoder adds "
        "what it has read elsewhere: train with --base, an encoder's directory or hub name"
    )
