"""The sections about how the model learned and how right it is."""

from __future__ import annotations

from typing import Any

from budgetformer.report import figures as draw
from budgetformer.report.kit import Cell, Section, Table
from budgetformer.report.numbers import PERCENT_METRICS
from budgetformer.report.numbers import format_count as whole
from budgetformer.report.numbers import format_decimal as decimal
from budgetformer.report.numbers import format_interval as interval
from budgetformer.report.numbers import format_percent as share
from budgetformer.report.numbers import format_score as score
from budgetformer.report.numbers import format_value as anything
from budgetformer.report.run import Run, clipped, dig, number

_LEGIBLE = 20  # classes in a confusion matrix, and pairs where there are more


def training(run: Run) -> Section:
    """Loss, validation score and mean budget while training."""
    epochs = [h for h in run.history if h.get("kind") == "epoch"]
    steps = [h for h in run.history if h.get("kind") == "step"]
    twin = [h for h in run.baseline_history if h.get("kind") == "epoch"]
    scored = [h for h in epochs if number(dig(h, "validation", "score")) is not None]
    if not epochs and not steps:
        return Section("training", "How it learned", "No history was recorded for this run, so there are no curves.")
    svgs = [
        draw.curves("loss", "Loss by step", "step", "loss", [
            draw.Curve("training, step", _pairs(steps, "step", "loss"), draw.GREY, marker=""),
            draw.Curve("training, epoch mean", _pairs(epochs, "step", "train", "loss"), draw.BLUE),
            draw.Curve("validation", _pairs(epochs, "step", "validation", "loss"), draw.ORANGE),
        ]),
        draw.curves("score", "Validation score by epoch", "epoch", f"validation {run.metric_word}", [
            draw.Curve("learned budget", _pairs(epochs, "epoch", "validation", "score"), draw.ORANGE),
            draw.Curve("all heads", _pairs(epochs, "epoch", "validation", "score_full"), draw.BLUE, ":", "s"),
            draw.Curve("dense twin", _pairs(twin, "epoch", "validation", "score"), draw.GREY, "--"),
        ], percent=run.metric in PERCENT_METRICS),
        draw.curves("budget", "Mean head budget by epoch", "epoch", "mean budget s", [
            draw.Curve("training", _pairs(epochs, "epoch", "train", "s_mean"), draw.BLUE),
            draw.Curve("validation", _pairs(epochs, "epoch", "validation", "s_mean"), draw.ORANGE),
        ]),
    ]  # fmt: skip
    lead = "The loss should fall and level off."
    if scored:
        best = next((h for h in reversed(scored) if h.get("best")), scored[-1])
        first, last = dig(scored[0], "validation", "s_mean"), dig(scored[-1], "validation", "s_mean")
        moved = f"went from {decimal(first, 2)} to {decimal(last, 2)}" if len(scored) > 1 else f"was {decimal(last, 2)}"
        lead = (
            f"The validation {run.metric_word} was best after epoch {anything(best.get('epoch'))} "
            f"({score(dig(best, 'validation', 'score'), run.metric)}); meanwhile the mean budget s that the model asks "
            f"for (0 = as few heads as possible, 1 = all) {moved}."
        )
    return Section("training", "How it learned", lead, [svg for svg in svgs if svg])


def _pairs(lines: list[dict[str, Any]], x: str, *y: str) -> draw.Points:
    both = [(number(h.get(x)), number(dig(h, *y))) for h in lines]
    known = [(a, b) for a, b in both if a is not None and b is not None]
    return [a for a, _ in known], [b for _, b in known]


def dials(run: Run) -> Section:
    """Score against budget, without retraining."""
    title, metric = "Score against budget", run.metric
    here = [d for d in run.evaluation.get("dials") or [] if d.get("split") in (None, run.split)]
    low, high = run.bounds()
    whole = {
        "dial": run.main.get("dial") or "learned", "score": run.main.get("score"), "low": low, "high": high,
        "s_mean": dig(run.main, "budget", "s_mean"), "k_over_h": dig(run.main, "budget", "k_over_h"),
        "flops_ratio": dig(run.main, "cost", "flops_ratio"),
    }  # fmt: skip
    learned = next((d for d in here if d.get("dial") == whole["dial"]), whole)  # on the same rows as the other dials
    rows_seen = number(learned.get("rows"))
    where = f"the first {rows_seen:,.0f} rows of the {run.split} split" if rows_seen else f"the {run.split} split"
    others = [d for d in here if d.get("dial") != learned["dial"] and number(d.get("k_over_h")) is not None]
    if not others:
        return Section("dials", title, "This model was evaluated at one budget only, so there is no curve.")
    rows = sorted([*others, learned], key=lambda d: number(d["k_over_h"]) or 0.0)
    dearer = any((number(d.get("flops_ratio")) or 0) > 1 for d in rows)
    gates = (
        " Choosing heads costs a little too, so running all of them exceeds 100\N{NO-BREAK SPACE}%." if dearer else ""
    )
    table = Table(
        "lrrrr",
        ["dial", "heads run", "FLOPs, share of dense", run.metric_word, "95\N{NO-BREAK SPACE}% interval"],
        [
            [
                str(d.get("dial")),
                share(d.get("k_over_h")),
                share(d.get("flops_ratio")),
                score(d.get("score"), metric),
                interval(d.get("low"), d.get("high"), metric) or "not computed",
            ]
            for d in rows
        ],
        note=f"Measured on {where}.{gates}",
        marked=rows.index(learned),
    )
    marks = [m for d in others if (m := _mark(d))]
    same_rows = rows_seen in (None, number(run.twin.get("rows")))  # or the twin's score is of other rows
    svg = draw.dial_curve(
        marks,
        _mark(learned),
        number(run.twin.get("score")) if same_rows else None,
        f"{run.split} {run.metric_word}",
        percent=metric in PERCENT_METRICS,
    )
    ends = sorted(others, key=lambda d: number(d["k_over_h"]) or 0.0)
    lead = (
        f"The budget can be changed when predicting, without training again: from {share(ends[0]['k_over_h'])} of the "
        f"heads ({run.metric_word} {score(ends[0].get('score'), metric)}) to {share(ends[-1]['k_over_h'])} "
        f"({score(ends[-1].get('score'), metric)}); left to itself the model runs {share(learned['k_over_h'])} and "
        f"scores {score(learned['score'], metric)}."
    )
    return Section("dials", title, lead, [svg], [table], beside=True)


def _mark(dial: dict[str, Any]) -> draw.Mark | None:
    x, y = number(dial.get("k_over_h")), number(dial.get("score"))
    if x is None or y is None:
        return None
    low, high = number(dial.get("low")), number(dial.get("high"))
    kind = str(dial.get("dial")).split(":")[0]
    return draw.Mark("fixed" if kind == "full" else kind, x, y, y if low is None else low, y if high is None else high)


def mistakes(run: Run) -> Section:
    """The confusion matrix, or the most confused pairs, and the figures of each class."""
    quality = run.main.get("quality") or {}
    names, confusion = [str(n) for n in quality.get("labels") or []], quality.get("confusion")
    classes = quality.get("per_class") or []
    tables = []
    lead = "Each class has its own row below; precision and recall tell false alarms from misses."
    if not classes:
        lead = "This task has no classes to confuse; see the hardest examples below."
    if confusion and len(names) == len(confusion):
        pairs = _pairs_confused(names, confusion)
        right = sum(row[i] for i, row in enumerate(confusion))
        lead = f"{whole(right)} of {whole(run.main.get('rows'))} {run.split} texts were answered right"
        if pairs:
            lead += (
                f"; the most common mistake is “{pairs[0][0]}” taken for “{pairs[0][1]}” ({whole(pairs[0][2])} of them)"
            )
        lead += "."
        tables.append(_matrix(names, confusion) if len(names) <= _LEGIBLE else _worst_pairs(pairs, len(names)))
    if classes:
        body: list[list[str | Cell]] = [
            [str(c.get("label")), whole(c.get("rows")), share(c.get("precision")), share(c.get("recall")),
             decimal(c.get("f1"))]
            for c in classes
        ]  # fmt: skip
        tables.append(Table("lrrrr", ["class", "texts", "precision", "recall", "F1"], body, "Class by class"))
    return Section("mistakes", "Where it goes wrong", lead, [], tables)


def _pairs_confused(names: list[str], confusion: list[list[int]]) -> list[tuple[str, str, int, float]]:
    """(true, predicted, count, share of the true class), most frequent first."""
    pairs = [
        (names[i], names[j], n, n / sum(row))
        for i, row in enumerate(confusion)
        for j, n in enumerate(row)
        if i != j and n
    ]
    return sorted(pairs, key=lambda p: -p[2])


def _matrix(names: list[str], confusion: list[list[int]]) -> Table:
    rows: list[list[str | Cell]] = [
        [name, *(Cell(whole(n) if n else "·", n / max(1, sum(row))) for n in row)]
        for name, row in zip(names, confusion, strict=True)
    ]
    note = "A row is the true class, a column the answer; the stronger the shade, the larger its share of the row."
    return Table("l" + "c" * len(names), ["true \\ answer", *names], rows, "Confusion matrix", note)


def _worst_pairs(pairs: list[tuple[str, str, int, float]], classes: int) -> Table:
    return Table(
        "llrr",
        ["true class", "answer", "texts", "share of the class"],
        [[true, answer, whole(n), share(part)] for true, answer, n, part in pairs[:_LEGIBLE]],
        "The most confused pairs",
        f"A matrix of {classes} classes would not be legible.",
    )


def hardest(run: Run) -> Section:
    """The texts with the highest loss."""
    items = run.main.get("hardest") or []
    title = "Hardest examples"
    if not items:
        return Section("hardest", title, "No examples were kept with this evaluation.")
    answer = decimal if run.main.get("task") == "regression" else anything
    rows: list[list[str | Cell]] = [
        [_shown(h), answer(h.get("label")), answer(h.get("predicted")), decimal(h.get("loss"), 2)] for h in items
    ]
    lead = (
        f"The {len(items)} {run.split} texts with the highest loss, the worst first: look for wrong labels in the data "
        "before blaming the model."
    )
    return Section("hardest", title, lead, [], [Table("lllr", ["text", "label", "predicted", "loss"], rows)])


def _shown(item: dict[str, Any]) -> str:
    texts = [clipped(t) for t in (item.get("text"), item.get("text_pair")) if t]
    place = [str(item["file"])] if item.get("file") else []
    place += [f"line {item['line']}"] if item.get("line") is not None else []
    return "\n".join([*(texts or ["text not stored"]), *([f"({', '.join(place)})"] if place else [])])
