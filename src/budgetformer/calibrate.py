"""The budgets of a trained model on held-out data: their curve, and operating points with names that every verb takes.

`max_disagreement` and `max_drop` are guarantees for texts like those that were looked at: positions are tried from the
safest to the fastest, in an order that no answer has influenced, each by an exact binomial bound at the confidence
that was asked for, up to the first that fails (fixed-sequence testing, so no correction for the number of tests).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from budgetformer.cost.measure import take_turns
from budgetformer.data.splits import sample_rows
from budgetformer.data.tokens import TokenTable
from budgetformer.dial import Dial
from budgetformer.engine.scores import Engine, Scores, leave_early, score, stop_at
from budgetformer.errors import BudgetFormerWarning, ModelError, UsageError
from budgetformer.evaluate import cost_of, is_correct, paired_difference, summarize
from budgetformer.exits import LIMITS, REGRESSION, same_answer
from budgetformer.runs.files import read_json, write_json
from budgetformer.spec import ModelSpec

SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
_APART = 0.02  # in cost, of two positions that are shown
_TIMED_TEXTS = 32  # one by one
_SECONDS = 10.0  # for all positions together


CALIBRATION = "calibration.json"


def operating_points(folder: Path) -> dict[str, str]:
    """The names that `calibrate` gave to places on the run's dial; none where it was not calibrated."""
    file = folder / CALIBRATION
    if not file.exists():
        return {}
    saved = read_json(file, "calibrate the run again")
    try:
        return {name: str(point["dial"]) for name, point in saved["points"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read ({error!r}): calibrate the run again") from None


def check_guarantee(folder: Path, point: str, engine: str) -> None:
    """Warn where a point is a guarantee that was made with another engine, or precision, than the one that answers."""
    saved = read_json(folder / CALIBRATION, "calibrate the run again")
    made_with = saved.get("engine", engine)
    if "guarantee" in saved["points"][point] and made_with != engine:
        warnings.warn(
            f"the guarantee {point} was made with {made_with}, and {engine} answers here, whose labels may differ: "
            f"make it again with budgetformer calibrate {folder} DATA",
            BudgetFormerWarning, stacklevel=3,
        )  # fmt: skip


def named_dial(text: str | float | None, points: Mapping[str, str]) -> Dial:
    """A dial as it is written, or the name of an operating point."""
    try:
        return Dial.parse(points.get(text, text) if isinstance(text, str) else text)
    except UsageError as error:
        known = f"; or one of this run's points: {', '.join(points)}" if points else ""
        raise UsageError(f"{error}{known}") from None


def exit_curve(scores: Scores, config: ModelSpec) -> list[dict[str, Any]]:
    """Cost and disagreement with the last stage at each limit, cheapest first; `scores` hold all stages' answers.

    Of limits with the same cost the safest is kept.
    """
    stages = config.stages
    curve: dict[float, dict[str, Any]] = {}
    assert scores.stage_logits is not None
    for limit in (0.0, *LIMITS, np.inf):
        early = leave_early(scores, stages, limit)
        differs = ~same_answer(early.logits, scores.stage_logits[:, -1], config.task)
        cost = cost_of(early, config)["flops_ratio"]
        curve.setdefault(cost, {"limit": float(limit), "cost": cost, "disagreement": float(differs.mean())})
    return sorted(curve.values(), key=lambda point: point["cost"])


class Position(NamedTuple):
    """A place on the dial and what the model answers there."""

    dial: str
    scores: Scores


def calibrate(
    engine: Engine,
    table: TokenTable,
    *,
    split: str,
    max_disagreement: Sequence[float] = (),
    max_drop: Sequence[float] = (),
    max_cost: Sequence[float] = (),
    target_ms: Sequence[float] = (),
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Sweep the budget over rows that the model was not trained on, and choose the operating points.

    `max_disagreement` is in percent of the texts whose answer differs from the full model's, `max_drop` in points of
    accuracy below it (for which rows need labels), `max_cost` a share of the dense model's FLOPs, `target_ms` the time
    of one text alone on this machine. Without any of them a disagreement is chosen that the number of rows allows.
    """
    config, labelled = engine.config, table.labels is not None
    _check(config, max_drop, max_cost, target_ms, confidence)
    guarantees = Guarantees(len(table), labelled, config.task, confidence)
    if not (max_disagreement or max_drop or max_cost or target_ms) and config.task != REGRESSION:
        max_disagreement = guarantees.default()
    positions = _positions(engine, table)
    reference, walked = positions[0].scores, [_measure(p, positions[0].scores, config, split) for p in positions]
    points: dict[str, dict[str, Any]] = {}
    for percent in max_disagreement:
        points[f"max-disagreement-{percent:g}"] = guarantees.disagreement(walked, percent)
    for drop in max_drop:
        points[f"max-drop-{drop:g}"] = guarantees.drop(walked, drop)
    shown = {p["dial"]: p for p in [*_thinned(walked), *points.values()]}
    curve = sorted(shown.values(), key=lambda p: -p["flops_ratio"])
    if target_ms:
        times = _time(engine, table, [p["dial"] for p in curve])
        curve = [{**p, "ms_per_text": times[p["dial"]]} for p in curve]
    for cost in max_cost:
        points[f"max-cost-{cost:g}"] = _best_under(curve, "flops_ratio", cost, f"--max-cost {cost:g}")
    for ms in target_ms:
        points[f"target-ms-{ms:g}"] = _best_under(curve, "ms_per_text", ms, f"--target-ms {ms:g}")
    curve = [{k: v for k, v in p.items() if k != "guarantee"} for p in curve]
    result = {"split": split, "rows": len(table), "engine": engine.name, "curve": curve, "points": points}
    if config.exits:
        result["stages"] = _stages(reference, config, points)
    return result


def depth_report(reference: Scores, config: ModelSpec, split: str) -> dict[str, Any] | None:
    """What exits do on labelled rows, from the answers of all stages: the budget `learned`, the curve, each stage by
    itself (everyone stops there: static truncation), and how often P(disagree) is right."""
    if not config.exits or config.task == REGRESSION:
        return None
    chosen, curve = str(Dial("exit", config.stages.options.limit)), list[dict[str, Any]]()
    for limit in (0.0, *LIMITS, math.inf):
        position = Position(str(Dial("exit", limit)), leave_early(reference, config.stages, limit))
        cost = cost_of(position.scores, config)["flops_ratio"]
        if not curve or abs(cost - curve[-1]["flops_ratio"]) > _APART:
            curve.append(_measure(position, reference, config, split))
    learned = Position(chosen, leave_early(reference, config.stages, config.stages.options.limit))
    return {
        "split": split,
        "rows": len(reference.logits),
        "learned": _measure(learned, reference, config, split),
        "curve": curve,
        "stages": _stages(reference, config, {"learned": {"dial": chosen}}),
        "reliability": _reliability(reference, config),
    }


def _reliability(scores: Scores, config: ModelSpec) -> list[dict[str, Any]]:
    """By stage, rows in five groups of rising P(disagree): its mean, and the share of rows whose answer did change."""
    stages, logits, groups = config.stages, scores.stage_logits, []
    assert logits is not None
    for stage, name in enumerate(stages.names[:-1]):
        risk = stages.risk(stage, logits[:, stage])
        differs = ~same_answer(logits[:, stage], logits[:, -1], config.task)
        for rows in np.array_split(np.argsort(risk, kind="stable"), min(5, len(risk))):
            pair = {"predicted": float(risk[rows].mean()), "observed": float(differs[rows].mean())}
            groups.append({"stage": name, "rows": len(rows), **pair})
    return groups


def _positions(engine: Engine, table: TokenTable) -> list[Position]:
    """Places on the dial from the safest to the fastest, the whole model first."""
    config = engine.config
    if config.exits and len(config.stages.depths) > 1:
        scores = score(engine, table, "exit:0")
        limits = (0.0, *LIMITS, math.inf)
        return [Position(str(Dial("exit", limit)), leave_early(scores, config.stages, limit)) for limit in limits]
    mode = "mean" if config.gate.ranks_layers else "max"
    dials = ["full", "learned", *(f"{mode}:{share:g}" for share in SHARES)]
    positions = [Position(dial, score(engine, table, dial)) for dial in dials]
    return [positions[0], *sorted(positions[1:], key=lambda p: (-cost_of(p.scores, config)["flops_ratio"], p.dial))]


def _measure(position: Position, reference: Scores, config: ModelSpec, split: str) -> dict[str, Any]:
    """Cost, disagreement with the whole model and, with labels, quality of one position."""
    scores, cost = position.scores, cost_of(position.scores, config)
    share = scores.heads / scores.num_heads
    entry: dict[str, Any] = {
        "dial": position.dial, "flops_ratio": cost["flops_ratio"], "k_over_h": float(share.mean()),
        "attention_flops_ratio": cost["attention_flops_ratio"],
    }  # fmt: skip
    if scores.exits is not None:
        entry["exits"] = [float((scores.exits == stage).mean()) for stage in range(len(config.stages.depths))]
    if config.task != REGRESSION:
        entry["disagreements"] = int((~same_answer(scores.logits, reference.logits, config.task)).sum())
        entry["disagreement"] = entry["disagreements"] / max(1, len(scores.logits))
    if scores.table.labels is not None:
        result = summarize(scores, config, split=split, dial=position.dial)
        low, high = result.interval
        entry |= {"metric": result.metric, "score": result.score, "low": low, "high": high}
        ours, full = is_correct(scores), is_correct(reference)
        if ours is not None and full is not None:
            entry["versus_full"] = paired_difference(ours, full)
            entry["only_full_right"], entry["only_ours_right"] = int((full & ~ours).sum()), int((ours & ~full).sum())
    return entry


def _thinned(walked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Positions whose costs are at least a little apart."""
    shown = walked[:1]
    for entry in walked[1:]:
        if abs(entry["flops_ratio"] - shown[-1]["flops_ratio"]) > _APART:
            shown.append(entry)
    return shown


def upper_bound(cases: int, rows: int, confidence: float) -> float:
    """The exact one-sided upper bound of a proportion (Clopper and Pearson)."""
    from scipy.stats import beta

    return 1.0 if cases >= rows else float(beta.ppf(confidence, cases + 1, rows - cases))


def lower_bound(cases: int, rows: int, confidence: float) -> float:
    """The exact one-sided lower bound of a proportion."""
    return 1 - upper_bound(rows - cases, rows, confidence)


class Guarantees(NamedTuple):
    """What can be promised from so many rows."""

    rows: int
    labelled: bool
    task: str
    confidence: float

    def needed(self, share: float, confidence: float) -> int:
        """The rows without which nothing can be promised, even if nothing goes wrong on any of them."""
        return math.ceil(math.log(1 - confidence) / math.log(1 - share))

    def default(self) -> list[float]:
        """The smallest of some disagreements that these rows allow to promise."""
        allowed = [p for p in (0.5, 1.0, 2.0, 5.0) if self.rows >= self.needed(p / 100, self.confidence)]
        return allowed[:1]

    def _enough(self, asked: str, share: float, confidence: float) -> None:
        if not 0 < share < 1:
            raise UsageError(f"{asked}: give a number above 0 and below 100")
        if self.task == REGRESSION:
            raise UsageError(f"{asked}: it is for classification; a regression gives numbers, not labels")
        if self.rows < (needed := self.needed(share, confidence)):
            raise UsageError(
                f"{asked} at a confidence of {self.confidence:g} needs at least {needed} rows that the model was not "
                f"trained on, and there are {self.rows}: give more rows, a larger number, or a lower --confidence"
            )

    def disagreement(self, walked: list[dict[str, Any]], percent: float) -> dict[str, Any]:
        """The fastest position that differs from the whole model on at most so many of all texts."""
        self._enough(f"--max-disagreement {percent:g}", percent / 100, self.confidence)

        def bound(entry: dict[str, Any]) -> float:
            return upper_bound(entry["disagreements"], self.rows, self.confidence)

        return self._last_safe(walked, bound, percent, "disagreement")

    def drop(self, walked: list[dict[str, Any]], points: float) -> dict[str, Any]:
        """The fastest position whose accuracy is at most so many points below the whole model's.

        The drop is P(only the whole model right) - P(only the budgeted one right), each bounded at half the risk.
        """
        half = (1 + self.confidence) / 2
        self._enough(f"--max-drop {points:g}", points / 100, half)
        if not self.labelled:
            raise UsageError(
                f"--max-drop {points:g}: the rows have no labels; give labelled rows, or --max-disagreement"
            )

        def bound(entry: dict[str, Any]) -> float:
            lost = upper_bound(entry["only_full_right"], self.rows, half)
            return lost - lower_bound(entry["only_ours_right"], self.rows, half)

        return self._last_safe(walked, bound, points, "drop")

    def _last_safe(
        self, walked: list[dict[str, Any]], bound: Callable[[dict[str, Any]], float], limit: float, kind: str
    ) -> dict[str, Any]:
        chosen, proven = walked[0], 0.0
        for entry in walked[1:]:
            if (reached := bound(entry)) > limit / 100:
                break
            chosen, proven = entry, reached
        promise = {
            "kind": kind,
            "limit": limit / 100,
            "bound": proven,
            "confidence": self.confidence,
            "rows": self.rows,
        }
        return {**chosen, "guarantee": promise}


def _stages(reference: Scores, config: ModelSpec, points: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each stage by itself: its answers for every row at what they cost; and what it saves at the first point."""
    stages, logits = config.stages, reference.stage_logits
    assert logits is not None
    first = next(iter(points.values()), None)
    limit = 0.0 if first is None else Dial.parse(first["dial"]).value or 0.0
    entries = []
    for stage, name in enumerate(stages.names):
        alone = stop_at(reference, stages, np.full(len(logits), stage))
        entry: dict[str, Any] = {"stage": name, "layers": stages.depths[stage]}
        entry["flops_ratio"] = cost_of(alone, config)["flops_ratio"]
        entry["disagreement"] = float((~same_answer(alone.logits, logits[:, -1], config.task)).mean())
        if reference.table.labels is not None:
            result = summarize(alone, config, split="", dial="")
            entry |= {"score": result.score, **dict(zip(("low", "high"), result.interval, strict=True))}
            ours, full = is_correct(alone), is_correct(reference)
            entry["versus_full"] = None if ours is None or full is None else paired_difference(ours, full)
        if stage < len(stages.names) - 1:
            without = stages.without(stage)
            costs = [cost_of(leave_early(reference, rule, limit), config)["flops_ratio"] for rule in (stages, without)]
            entry["saves"] = costs[1] - costs[0]  # a share of the dense model's cost
        entries.append(entry)
    return entries


def write_calibration(folder: Path, result: dict[str, Any]) -> None:
    """Store the curve and the points in the run."""
    write_json(folder / CALIBRATION, result)


def _check(
    config: ModelSpec,
    max_drop: Sequence[float],
    max_cost: Sequence[float],
    target_ms: Sequence[float],
    confidence: float,
) -> None:
    if not config.exits and not config.gate.can_dial:
        raise UsageError(
            f"a model without exits and with gates of the kind {config.gate.kind!r} has no budget to calibrate"
        )
    if wrong := [value for value in max_cost if not 0 < value <= 1]:
        raise UsageError(f"--max-cost {wrong[0]:g}: give a share of the dense model's FLOPs, above 0 and up to 1")
    if wrong := [value for value in target_ms if not value > 0]:
        raise UsageError(f"--target-ms {wrong[0]:g}: give milliseconds above 0")
    if not 0.5 <= confidence < 1:
        raise UsageError(f"--confidence {confidence:g}: give a probability from 0.5 to below 1, such as 0.95")


def _best_under(curve: list[dict[str, Any]], key: str, limit: float, asked: str) -> dict[str, Any]:
    reached = [p for p in curve if p[key] <= limit]
    if not reached:
        least = min(curve, key=lambda p: p[key])
        raise UsageError(f"{asked}: no position of the dial reaches it; the least is {least[key]:.3g}, {least['dial']}")
    quality = "score" if "score" in reached[0] else "disagreement"
    return max(reached, key=lambda p: (p[quality] if quality == "score" else -p[quality], -p[key]))


def _time(engine: Engine, table: TokenTable, dials: list[str]) -> dict[str, float]:
    """Milliseconds of one text alone at each position, in turns, on a sample of the texts."""
    texts = [table.select(rows) for rows in sample_rows(len(table), _TIMED_TEXTS)[:, None]]

    def run(dial: Dial) -> None:
        for text in texts:
            score(engine, text, dial)

    calls = {dial: partial(run, Dial.parse(dial)) for dial in dials}
    times = take_turns(calls, seconds=_SECONDS, least=3, most=20)
    return {dial: ms / len(texts) for dial, ms in times.items()}
