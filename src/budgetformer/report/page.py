"""The sections, put on one page that needs nothing but itself."""

from __future__ import annotations

from budgetformer.report import sections
from budgetformer.report.kit import environment
from budgetformer.report.numbers import METRIC_NAMES, format_count, format_interval, format_percent, format_score
from budgetformer.report.run import Run

_TASKS = {
    "single_label_classification": "one of {n} classes for each text",
    "multi_label_classification": "any of {n} labels for each text",
    "regression": "a number for each text",
}


def render(run: Run) -> str:
    """The whole page as HTML."""
    html = environment()
    html.filters |= {"percent": format_percent, "thousands": format_count, "score": run.format_score}
    made = (sections.training, sections.dials, sections.heads, sections.mistakes, sections.flops, sections.hardest)
    return html.get_template("page.html").render(
        run=run,
        record=run.record,
        final=run.final,
        twin=run.twin,
        task=_TASKS[run.record["task"]].format(n=len(run.record["labels"])),
        certainty=_certainty(run),
        sections=[make(run) for make in (*made, sections.provenance)],
    )


def _certainty(run: Run) -> str:
    """The score's interval, or that of a metric of the same task that has one."""
    metric = {"micro_f1": "exact_match", "r2": "mse"}.get(run.final.metric, run.final.metric)
    figure = run.final.quality[metric]
    span = format_interval(figure["low"], figure["high"], metric)
    if not span:
        return "no interval computed"
    if metric == run.final.metric:
        return f"95\N{NO-BREAK SPACE}% interval {span}"
    return f"{METRIC_NAMES[metric]} {format_score(figure['value'], metric)} (95\N{NO-BREAK SPACE}% interval {span})"
