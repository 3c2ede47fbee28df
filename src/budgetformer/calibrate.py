"""The dial of a trained model on held-out data: its curve, and positions with names that every verb takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from budgetformer.cost.timing import take_turns
from budgetformer.data import Encoded, collate
from budgetformer.errors import ModelError, UsageError
from budgetformer.evaluate import right, run_model, summarize
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.nn.allocation import Dial
from budgetformer.runs.files import write_json

SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
_Z95 = 1.959963984540054
_TIMED = 32  # texts, one by one
_SECONDS = 10.0  # for all positions together


def operating_points(run: Path) -> dict[str, str]:
    """The names that `calibrate` gave to places on the run's dial; none where it was not calibrated."""
    file = run / "calibration.json"
    if not file.exists():
        return {}
    try:
        points = json.loads(file.read_text(encoding="utf-8"))["points"]
        return {name: str(point["dial"]) for name, point in points.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read ({error}): calibrate the run again") from None


def read_dial(text: str | None, run: Path) -> Dial:
    """A dial as it is written, or the name of one of the run's operating points."""
    return named_dial(text, operating_points(run) if text else {})


def named_dial(text: str | None, points: Mapping[str, str]) -> Dial:
    """A dial as it is written, or by name."""
    try:
        return Dial.parse(points.get(text, text) if text else text)
    except UsageError as error:
        named = f"; or one of this run's points: {', '.join(points)}" if points else ""
        raise UsageError(f"{error}{named}") from None


def calibrate(
    model: BudgetFormerForSequenceClassification,
    encoded: Encoded,
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
    _check(model, max_drop, max_cost, target_ms)
    mode = "mean" if model.config.allocator in ("ranked", "order") else "max"
    dials = [*(f"{mode}:{share:g}" for share in SHARES), "learned", "full"]
    outcomes = {dial: run_model(model, encoded, dial) for dial in dials}
    full = right(outcomes["full"], encoded, model.config.task)
    times = _time(model, encoded, dials) if target_ms else {}
    curve = []
    for dial, outcome in outcomes.items():
        found = summarize(outcome, encoded, model.config, split=split, dial=dial)
        interval = found.quality.get(found.metric)
        mine = right(outcome, encoded, model.config.task)
        curve.append({
            "dial": dial, "metric": found.metric, "score": found.score,
            "low": interval["low"] if isinstance(interval, dict) else None,
            "high": interval["high"] if isinstance(interval, dict) else None,
            "versus_full": _difference(mine, full) if mine is not None and full is not None else None,
            "k_over_h": found.budget["k_over_h"], "flops_ratio": found.cost["flops_ratio"],
            "attention_flops_ratio": found.cost["attention_flops_ratio"], "ms_per_text": times.get(dial),
        })  # fmt: skip
    points = {}
    best = next(p["score"] for p in curve if p["dial"] == "full")
    for drop in max_drop:
        kept = [p for p in curve if p["score"] >= best - drop / 100]
        points[f"max-drop-{drop:g}"] = min(kept, key=lambda p: p["attention_flops_ratio"])
    for cost in max_cost:
        points[f"max-cost-{cost:g}"] = _best_under(curve, "attention_flops_ratio", cost, f"--max-cost {cost:g}")
    for ms in target_ms:
        points[f"target-ms-{ms:g}"] = _best_under(curve, "ms_per_text", ms, f"--target-ms {ms:g}")
    return {"split": split, "rows": len(encoded), "curve": curve, "points": points}


def write_calibration(run: Path, result: dict[str, Any]) -> Path:
    """Store the curve and the points in the run."""
    file = run / "calibration.json"
    write_json(file, result)
    return file


def _check(
    model: BudgetFormerForSequenceClassification,
    max_drop: Sequence[float],
    max_cost: Sequence[float],
    target_ms: Sequence[float],
) -> None:
    if model.config.allocator in ("all", "given"):
        raise UsageError(f"a model with the allocator {model.config.allocator!r} has no dial to calibrate")
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


def _difference(mine: NDArray[np.bool_], full: NDArray[np.bool_]) -> dict[str, float]:
    """The paired difference in the share of right answers, with its normal 95 % interval."""
    n, gain, loss = len(mine), int((mine & ~full).sum()), int((~mine & full).sum())
    value = (gain - loss) / n
    half = _Z95 * math.sqrt(max(0.0, gain + loss - (gain - loss) ** 2 / n)) / n
    return {"value": value, "low": value - half, "high": value + half}


def _time(model: BudgetFormerForSequenceClassification, encoded: Encoded, dials: list[str]) -> dict[str, float]:
    """Milliseconds of one text alone at each position, in turns; the texts are the first ones."""
    was_training = model.training
    model.train(False)
    rows = [np.array([row]) for row in range(min(_TIMED, len(encoded)))]
    batches = [collate(encoded, row, model.config.pad_token_id or 0).to(model.device) for row in rows]

    def run(dial: str) -> None:
        for batch in batches:
            model(batch.input_ids, token_type_ids=batch.token_type_ids, budget=dial)

    with torch.inference_mode():
        found = take_turns({dial: lambda dial=dial: run(dial) for dial in dials}, seconds=_SECONDS, least=3, most=20)  # type: ignore[misc]
    model.train(was_training)
    return {dial: ms / len(batches) for dial, ms in found.items()}
