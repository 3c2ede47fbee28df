"""The page and the model card of a run, each of which needs nothing but itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from budgetformer.evaluate import pretrained_hint
from budgetformer.report import depth, sections
from budgetformer.report.kit import Cell, Table, environment, escape_markdown
from budgetformer.report.numbers import METRIC_NAMES, format_count, format_interval, format_score
from budgetformer.report.sections import Results

if TYPE_CHECKING:
    from markupsafe import Markup

_TASKS = {
    "single_label_classification": "one of {n} classes for each text",
    "multi_label_classification": "any of {n} labels for each text",
    "regression": "a number for each text",
}


def report(folder: Path) -> str:
    """The page of the run in a directory, as HTML."""
    results, html = Results.read(folder), environment()
    record, opening = results.record, depth.comparison(results)
    html.filters |= {"thousands": format_count, "score": results.format_score}
    task = _TASKS[record["task"]].format(n=len(record["labels"]))
    shown = [section(results) for section in (depth.depth, *sections.SECTIONS)]
    return html.get_template("page.html").render(
        run=results, record=record, final=results.final, twin=results.twin, task=task, interval=_interval(results),
        comparison=opening, plain=depth.plain_verdict(results), hint=pretrained_hint(record),
        sections=[section for section in shown if section is not None],
    )  # fmt: skip


def _interval(results: Results) -> str:
    """The score's interval, or that of a metric of the same task that has one."""
    final = results.final
    metric = {"micro_f1": "exact_match", "r2": "mse"}.get(final.metric, final.metric)
    figure = final.quality[metric]
    if not (bounds := format_interval(figure["low"], figure["high"], metric)):
        return "no interval computed"
    text = f"95\N{NO-BREAK SPACE}% interval {bounds}"
    return (
        text if metric == final.metric else f"{METRIC_NAMES[metric]} {format_score(figure['value'], metric)} ({text})"
    )


def card(folder: Path) -> str:
    """Its model card, as Markdown."""
    results, markdown = Results.read(folder), environment(escape=escape_markdown)
    markdown.filters |= {"code": _code_span, "table": _markdown_table}
    template = markdown.get_template("card.md")
    dense = results.dense_training
    return template.render(
        record=results.record, final=results.final, verdict=results.verdict, dense=dense,
        comparison=depth.comparison(results), stages=depth.stage_table(results) if results.depth else None,
        learned=depth.shown_dial(results) if results.depth else None, plain=depth.plain_verdict(results),
        hint=pretrained_hint(results.record),
    )  # fmt: skip


def _code_span(text: str) -> Markup:
    """Any text as code, on one line, between more backticks than it has in a row."""
    from markupsafe import Markup

    text = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}")


def _markdown_table(table: Table) -> Markup:
    """A table in Markdown; what stands below a cell follows it in brackets."""
    from markupsafe import Markup

    rule = ["---:" if letter == "r" else "---" for letter in table.align]
    rows = [[f"{cell} ({cell.below})" if isinstance(cell, Cell) and cell.below else str(cell) for cell in row]
            for row in table.rows]  # fmt: skip
    cells = [[escape_markdown(cell) for cell in row] for row in (table.head, *rows)]
    return Markup("\n".join(f"| {' | '.join(row)} |" for row in (cells[0], rule, *cells[1:])))
