"""The dial of a trained model on held-out data: its curve, and operating points with names that every verb takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from budgetformer.cost.measure import take_turns
from budgetformer.data.batches import collate
from budgetformer.data.splits import sample_rows
from budgetformer.data.tokens import TokenTable
from budgetformer.engine.scores import Engine, Scores, leave_early, score
from budgetformer.errors import ModelError, UsageError
from budgetformer.evaluate import cost_of, is_correct, paired_difference, summarize
from budgetformer.exits import LIMITS, same_answer
from budgetformer.models.config import BudgetFormerConfig
from budgetformer.nn.allocation import Dial
from budgetformer.runs.files import read_json, write_json

SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
_TIMED_TEXTS = 32  # one by one
_SECONDS = 10.0  # for all positions together


def operating_points(folder: Path) -> dict[str, str]:
    """The names that `calibrate` gave to places on the run's dial; none where it was not calibrated."""
    file = folder / "calibration.json"
    if not file.exists():
        return {}
    saved = read_json(file, "calibrate the run again")
    try:
        return {name: str(point["dial"]) for name, point in saved["points"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read ({error!r}): calibrate the run again") from None


def named_dial(text: str | None, points: Mapping[str, str]) -> Dial:
    """A dial as it is written, or the name of an operating point."""
    try:
        return Dial.parse(points.get(text, text) if text else text)
    except UsageError as error:
        known = f"; or one of this run's points: {', '.join(points)}" if points else ""
        raise UsageError(f"{error}{known}") from None


def exit_curve(scores: Scores, config: BudgetFormerConfig) -> list[dict[str, Any]]:
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


def calibrate(
    engine: Engine,
    table: TokenTable,
    *,
    split: str,
    max_drop: Sequence[float] = (),
    max_cost: Sequence[float] = (),
    target_ms: Sequence[float] = (),
) -> dict[str, Any]:
    """Sweep the dial over labelled rows that the model was not trained on, and choose the operating points.

    `max_drop` is in points of the score under that of all heads, `max_cost` a share of the dense attention's FLOPs,
    `target_ms` the time of one text alone on this machine.
    """
    config = engine.config
    _check(config, max_drop, max_cost, target_ms)
    mode = "mean" if config.gate.ranks_layers else "max"
    dials = [*(f"{mode}:{share:g}" for share in SHARES), "learned", "full"]
    scores = {dial: score(engine, table, dial) for dial in dials}
    correct = {dial: is_correct(s) for dial, s in scores.items()}
    full = correct["full"]
    times = _time(engine, table, dials) if target_ms else {}
    curve = []
    for dial in dials:
        result, ours = summarize(scores[dial], config, split=split, dial=dial), correct[dial]
        low, high = result.interval
        curve.append({
            "dial": dial, "metric": result.metric, "score": result.score, "low": low, "high": high,
            "versus_full": paired_difference(ours, full) if ours is not None and full is not None else None,
            "k_over_h": result.budget["k_over_h"], "flops_ratio": result.cost["flops_ratio"],
            "attention_flops_ratio": result.cost["attention_flops_ratio"], "ms_per_text": times.get(dial),
        })  # fmt: skip
    points = {}
    best = next(p["score"] for p in curve if p["dial"] == "full")
    for drop in max_drop:
        within = [p for p in curve if p["score"] >= best - drop / 100]
        points[f"max-drop-{drop:g}"] = min(within, key=lambda p: p["attention_flops_ratio"])
    for cost in max_cost:
        points[f"max-cost-{cost:g}"] = _best_under(curve, "attention_flops_ratio", cost, f"--max-cost {cost:g}")
    for ms in target_ms:
        points[f"target-ms-{ms:g}"] = _best_under(curve, "ms_per_text", ms, f"--target-ms {ms:g}")
    return {"split": split, "rows": len(table), "curve": curve, "points": points}


def write_calibration(folder: Path, result: dict[str, Any]) -> None:
    """Store the curve and the points in the run."""
    write_json(folder / "calibration.json", result)


def _check(
    config: BudgetFormerConfig,
    max_drop: Sequence[float],
    max_cost: Sequence[float],
    target_ms: Sequence[float],
) -> None:
    if not config.gate.can_dial:
        raise UsageError(f"a model with gates of the kind {config.kind!r} has no dial to calibrate")
    if wrong := [value for value in max_drop if not 0 <= value <= 100]:
        raise UsageError(f"--max-drop {wrong[0]:g}: give points of the score, from 0 to 100")
    if wrong := [value for value in max_cost if not 0 < value <= 1]:
        raise UsageError(f"--max-cost {wrong[0]:g}: give a share of the dense attention's FLOPs, above 0 and up to 1")
    if wrong := [value for value in target_ms if not value > 0]:
        raise UsageError(f"--target-ms {wrong[0]:g}: give milliseconds above 0")


def _best_under(curve: list[dict[str, Any]], key: str, limit: float, asked: str) -> dict[str, Any]:
    reached = [p for p in curve if p[key] <= limit]
    if not reached:
        least = min(curve, key=lambda p: p[key])
        raise UsageError(f"{asked}: no position of the dial reaches it; the least is {least[key]:.3g}, {least['dial']}")
    return max(reached, key=lambda p: (p["score"], -p[key]))


def _time(engine: Engine, table: TokenTable, dials: list[str]) -> dict[str, float]:
    """Milliseconds of one text alone at each position, in turns, on a sample of the texts."""
    rows = sample_rows(len(table), _TIMED_TEXTS)
    batches = [collate(table, rows[i : i + 1], engine.config.pad_token_id or 0) for i in range(len(rows))]

    def run(dial: Dial) -> None:
        with engine.session(dial):
            for batch in batches:
                engine.logits(batch, dial)

    calls = {dial: partial(run, Dial.parse(dial)) for dial in dials}
    times = take_turns(calls, seconds=_SECONDS, least=3, most=20)
    return {dial: ms / len(batches) for dial, ms in times.items()}
