"""A trained model's evaluation.json, model card and report, and the spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from budgetformer.data.splits import sample_rows
from budgetformer.engine.scores import Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.evaluate import Evaluation, evaluate, is_correct, mcnemar, summarize, with_texts
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.report import write_card, write_report
from budgetformer.runs.files import read_json, write_json
from budgetformer.training.prepare import Prepared

DIALS = ("fixed:0.125", "fixed:0.25", "fixed:0.5", "fixed:0.75", "max:0.25", "max:0.5", "full")
RANKED_DIALS = ("mean:0.125", "mean:0.25", "mean:0.5", "mean:0.75", "fixed:0.25", "fixed:0.5", "full")
_CURVE_ROWS = 2000  # of the final split, for each position of the dial
_HARDEST = 12


def evaluate_run(prepared: Prepared, folder: Path, model: BudgetFormerForSequenceClassification) -> Scores:
    """Write evaluation.json: the final split and validation as learned, and the dial's curve on the final split."""
    final = prepared.final
    engine = TorchEngine(model)
    outcomes = {name: score(engine, prepared.splits[name]) for name in dict.fromkeys(("validation", final))}
    results = {}
    for name, outcome in outcomes.items():
        rows = _HARDEST if name == final else 0
        results[name] = summarize(outcome, model.config, split=name, dial="learned", hardest=rows)
    results[final] = with_texts(results[final], prepared.data.splits[final])
    dials = ("learned", *(RANKED_DIALS if model.config.gate.ranks_layers else DIALS))
    sample = prepared.splits[final].select(sample_rows(results[final].rows, _CURVE_ROWS))
    curve = [evaluate(engine, sample, split=final, dial=d) for d in (dials if model.config.gate.can_dial else ())]
    evaluation: dict[str, Any] = {"test": None, **{name: asdict(result) for name, result in results.items()}}
    evaluation |= {"dials": [dial_point(e) for e in curve], "baseline": None, "versus_baseline": None}
    write_json(folder / "evaluation.json", evaluation)
    return outcomes[final]


def dial_point(evaluation: Evaluation) -> dict[str, Any]:
    """One position of the dial, for the curve of score against cost."""
    return {
        **{name: getattr(evaluation, name) for name in ("dial", "split", "rows", "metric", "score")},
        **dict(zip(("low", "high"), evaluation.interval, strict=True)),
        **{name: evaluation.budget[name] for name in ("s_mean", "k_over_h")},
        **{name: evaluation.cost[name] for name in ("flops_per_text", "flops_ratio")},
    }


def publish(folder: Path, ours: Scores | None, twin: Scores | None) -> dict[str, Any]:
    """Put the twin's figures beside ours in evaluation.json, write cards and reports, and return the evaluation."""
    result: dict[str, Any] = read_json(folder / "evaluation.json", "delete run.json and resume")
    if ours is not None and twin is not None:
        baseline = read_json(folder / "baseline" / "evaluation.json", "delete baseline and resume")
        result["baseline"] = {name: baseline[name] for name in ("test", "validation")}
        a, b = is_correct(ours), is_correct(twin)
        result["versus_baseline"] = mcnemar(a, b) if a is not None and b is not None else None
        write_json(folder / "evaluation.json", result)
    for place in (folder / "baseline", folder) if twin is not None else (folder,):
        write_card(place)
        write_report(place)
    return result


def summarize_seeds(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, standard deviation and values of the figures of several runs, for our model and the dense twin."""
    models = {}
    for model in ("budgetformer", "baseline"):
        evaluations = [r["baseline"] if model == "baseline" else r for r in results]
        finals = [e["test"] or e["validation"] for e in evaluations if e]
        if finals:
            models[model] = {
                "metric": finals[0]["metric"],
                "score": _spread([f["score"] for f in finals]),
                "k_over_h": _spread([f["budget"]["k_over_h"] for f in finals]),
                "flops_ratio": _spread([f["cost"]["flops_ratio"] for f in finals]),
            }
    return models


def _spread(values: list[float]) -> dict[str, Any]:
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "std": deviation, "values": values}
