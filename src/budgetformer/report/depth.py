"""What opens a report, the comparison with simple rivals; and how far texts go: exits, their cost, their rule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from budgetformer.evaluate import CHEAPER, words_suffice
from budgetformer.report import figures as draw
from budgetformer.report import numbers
from budgetformer.report.kit import Cell, Section, Table
from budgetformer.report.numbers import format_percent
from budgetformer.report.sections import Results

_ROWS = {
    "words": "words alone",
    "dense twin": "dense twin",
    CHEAPER: f"this model, at {CHEAPER}",
    "learned": "this model, as learned",
    "full": "this model, full",
}
_MEANINGS = {
    "words": "Words alone: the linear model over words and pairs of words, by itself.",
    "dense twin": "The dense twin: the same Transformer without budgets, exits or words.",
    CHEAPER: f"At {CHEAPER}: about that share of the dense model's cost (--budget {CHEAPER}).",
    "learned": "As learned: the default budget.",
    "full": "Full: every text through every layer, with all heads.",
}


def comparison(run: Results) -> Table:
    """Words alone, the dense twin and the model at its budgets: score, interval, cost, share of texts per exit."""
    stages = run.final.exits["stages"] if run.final.exits else []
    rows: list[list[str | Cell]] = [
        [_ROWS[p["model"]],
         Cell(run.format_score(p["score"]), below=numbers.format_interval(p["low"], p["high"], p["metric"])),
         format_percent(p["flops_ratio"]), format_percent(p["k_over_h"]),
         *([format_percent(share) for share in p["exits"]] if p["exits"] else [numbers.DASH] * len(stages))]
        for p in run.comparison
    ]  # fmt: skip
    interval = "" if run.comparison[0]["low"] is None else ", 95\N{NO-BREAK SPACE}% interval"
    head = ["", f"{run.final.split} {run.metric_name}{interval}", "FLOPs, share of dense", "heads run"]
    marked = [p["model"] for p in run.comparison].index("learned")
    note = " ".join(_MEANINGS[p["model"]] for p in run.comparison)
    return Table("lrrr" + "r" * len(stages), [*head, *(f"left at {s}" for s in stages)], rows, note=note, marked=marked)


def plain_verdict(run: Results) -> str | None:
    """That the words would do, where they would."""
    return words_suffice(run.depth["stages"], run.twin.score if run.twin else None) if run.depth else None


def stage_table(run: Results) -> Table:
    """Share, accuracy and cost of each stage: of the texts that leave there, and if every text stopped there."""
    assert run.depth is not None
    assert run.final.exits is not None
    leaving = zip(run.depth["stages"], run.final.exits["share"], run.final.exits["right"], strict=True)
    trusted = reliability(run.depth["reliability"])
    rows = []
    for stage, share, right in leaving:
        predicted, observed = trusted.get(stage["stage"], (None, None))
        rows.append(
            [stage["stage"], format_percent(share), format_percent(right), format_percent(predicted),
             format_percent(observed), run.format_score(stage["score"]), format_percent(stage["flops_ratio"]),
             format_percent(stage.get("saves"))]
        )  # fmt: skip
    head = ["stage", "texts that leave", "of them right", "P(disagree), mean", "do disagree",
            f"{run.metric_name} if all stop here", "cost if all stop here", "saves"]  # fmt: skip
    note = (
        "P(disagree) is the chance that the last stage will answer otherwise, over all texts. Costs are shares of the "
        "dense model's FLOPs; a stage saves what the learned budget would cost more without it."
    )
    return Table("lrrrrrrr", head, rows, "Stage by stage", note)


def reliability(groups: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """By stage, the mean P(disagree) and the share of texts that do disagree."""
    result = {}
    for stage, members in groupby(groups, key=lambda group: group["stage"]):
        parts = list(members)
        rows = sum(part["rows"] for part in parts)
        means = [sum(part["rows"] * part[key] for part in parts) / rows for key in ("predicted", "observed")]
        result[str(stage)] = (means[0], means[1])
    return result


def depth(run: Results) -> Section | None:
    """Accuracy against cost beside static truncation, what each stage does, and whether P(disagree) can be trusted."""
    if run.depth is None or run.final.exits is None:
        return None
    depth = run.depth
    learned, stages = depth["learned"], depth["stages"]
    left = ", ".join(
        f"{format_percent(share)} at {name}"
        for name, share in zip(run.final.exits["stages"], run.final.exits["share"], strict=True)
    )
    lead = (
        f"A text leaves at the first stage that is sure enough of the last stage's answer: {left}. The learned budget "
        f"is {shown_dial(run)}, the fastest that gave another label to at most 0.5\N{NO-BREAK SPACE}% of the "
        f"validation rows that it was fitted to; here it is {format_percent(learned['disagreement'], 2)}, at "
        f"{format_percent(learned['flops_ratio'])} of the dense cost. {_against_static(run)}"
    )
    svgs = [
        draw.cost_curve(depth["curve"], stages, learned, run.twin.score if run.twin else None,
                        f"{run.final.split} {run.metric_name}", percent=run.is_percent),
        draw.reliability(depth["reliability"]),
    ]  # fmt: skip
    head = ["stage", "texts", "P(disagree)", "do disagree"]
    groups = [
        [g["stage"], numbers.format_count(g["rows"]), *(format_percent(g[key], 2) for key in ("predicted", "observed"))]
        for g in depth["reliability"]
    ]  # fmt: skip
    note = (
        "Texts of a stage in groups of rising P(disagree): its mean, and how many the last stage did answer otherwise."
    )
    tables = [stage_table(run), Table("lrrr", head, groups, "Reliability of the exit rule", note)]
    return Section("depth", "How far texts go", lead, svgs, tables)


def shown_dial(run: Results) -> str:
    """The learned budget, as `--budget` takes it, to three digits."""
    assert run.depth is not None
    mode, _, limit = run.depth["learned"]["dial"].partition(":")
    return f"{mode}:{float(limit):.3g}"


def _against_static(run: Results) -> str:
    """What leaving text by text scores at what stopping every text at a stage costs."""
    assert run.depth is not None
    parts = []
    for stage in run.depth["stages"][:-1]:
        as_cheap = [p for p in run.depth["curve"] if p["flops_ratio"] <= stage["flops_ratio"]]
        if stage["layers"] and as_cheap:
            score = max(as_cheap, key=lambda point: point["flops_ratio"])["score"]
            parts.append(
                f"{format_percent(stage['flops_ratio'])} buys {run.format_score(stage['score'])} if every text stops "
                f"at {stage['stage']}, and {run.format_score(score)} if each leaves when it is sure"
            )
    return f"Of the dense cost, {'; '.join(parts)}." if parts else ""
