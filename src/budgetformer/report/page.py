"""The sections, put on one page that needs nothing but itself."""

from __future__ import annotations

from typing import Any

from budgetformer.report import cost as spending
from budgetformer.report import results
from budgetformer.report.kit import environment
from budgetformer.report.numbers import format_count, format_percent, format_value
from budgetformer.report.run import Run

_TASKS = {
    "single_label_classification": "one of {n} classes for each text",
    "multi_label_classification": "any of {n} labels for each text",
    "regression": "a number for each text",
}


def render(
    facts: dict[str, Any],
    history: list[dict[str, Any]],
    evaluation: dict[str, Any],
    baseline_history: list[dict[str, Any]],
) -> str:
    """The whole page as HTML."""
    run = Run(facts, history, evaluation, baseline_history)
    return (
        environment()
        .get_template("page.html")
        .render(
            name=str(facts.get("name") or "run"),
            version=format_value(facts.get("budgetformer")),
            trained=_trained(facts),
            notices=_notices(run),
            headline=spending.headline(run),
            verdict=spending.verdict(run),
            sections=[
                results.training(run),
                results.dials(run),
                spending.heads(run),
                results.mistakes(run),
                spending.cost(run),
                results.hardest(run),
                spending.provenance(run),
            ],
        )
    )


def _trained(facts: dict[str, Any]) -> str:
    """What was trained on what."""
    model, data = facts.get("model") or {}, facts.get("data")
    source = data.get("data") if isinstance(data, dict) else data
    rows = (facts.get("splits") or {}).get("train")
    task = _TASKS.get(str(facts.get("task")), "{n} outputs").format(n=len(facts.get("labels") or []))
    return (
        f"A Transformer of {format_value(model.get('layers'))} layers with {format_value(model.get('heads'))} "
        f"heads each and {format_count(model.get('parameters'))} parameters, trained on {format_count(rows)} texts "
        f"from {format_value(source)} to predict {task}."
    )


def _notices(run: Run) -> list[str]:
    """What a reader must know before trusting the figures."""
    notices = []
    if run.facts.get("status") not in (None, "done"):
        progress = format_percent((run.facts.get("training") or {}).get("progress"), 0)
        notices.append(f"This run is not finished ({run.facts['status']}, at {progress} of its plan).")
    if not run.main:
        notices.append("The model has not been evaluated yet.")
    elif not run.evaluation.get("test"):
        notices.append(
            "There is no test split: the figures come from the validation split, on which the best epoch was chosen, "
            "and so are a little too good."
        )
    return notices
