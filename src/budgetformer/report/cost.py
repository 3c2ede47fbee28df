"""The sections about heads, FLOPs and provenance, and the headline that sums everything up."""

from __future__ import annotations

from typing import Any

from budgetformer.report.kit import Cell, Section, Table
from budgetformer.report.numbers import DASH, METRIC_NAMES
from budgetformer.report.numbers import flatten as flat
from budgetformer.report.numbers import format_count as whole
from budgetformer.report.numbers import format_decimal as decimal
from budgetformer.report.numbers import format_flops as flops
from budgetformer.report.numbers import format_interval as interval
from budgetformer.report.numbers import format_percent as share
from budgetformer.report.numbers import format_score as score
from budgetformer.report.numbers import format_seconds as seconds
from budgetformer.report.numbers import format_value as anything
from budgetformer.report.run import Run, dig, number, numbers

_CLASSES = 30  # rows of the heat map


def headline(run: Run) -> list[tuple[str, str, str]]:
    """The four figures at the top: what it is, its value, a word beside it."""
    k, ratio = dig(run.main, "budget", "k_over_h"), dig(run.main, "cost", "flops_ratio")
    return [
        (f"{run.split} {run.metric_word}", score(run.main.get("score"), run.metric), _certainty(run)),
        ("attention heads run", share(k), f"of {anything(dig(run.facts, 'model', 'heads'))} in each layer, on average"),
        ("FLOPs per text", share(ratio), "of its dense twin, whole model, counted"),
        (
            "dense twin",
            score(run.twin.get("score"), run.metric) if run.twin else "not trained",
            f"{run.split} {run.metric_word}" if run.twin else "so there is nothing to compare with",
        ),
    ]


def _certainty(run: Run) -> str:
    """The score's interval, or that of a metric of the same task that has one."""
    for metric in (run.metric, "exact_match", "mse"):
        found = dig(run.main, "quality", metric)
        span = interval(dig(found, "low"), dig(found, "high"), metric)
        if span and metric == run.metric:
            return f"95\N{NO-BREAK SPACE}% interval {span}"
        if span:
            return (
                f"{METRIC_NAMES[metric]} {score(dig(found, 'value'), metric)} (95\N{NO-BREAK SPACE}% interval {span})"
            )
    return "no interval computed"


def verdict(run: Run) -> str:
    """One sentence on the comparison with the dense twin."""
    said = dig(run.evaluation, "versus_baseline", "verdict")
    if said:
        whom = " (counting texts with all labels right)" if run.main.get("task") == "multi_label_classification" else ""
        return f"This model is {said}{whom}."
    ours, theirs = number(run.main.get("score")), number(run.twin.get("score"))
    if ours is None or theirs is None:
        return "No dense twin was evaluated, so this page cannot say what the saved heads cost in quality."
    return (
        f"Against its dense twin: {run.metric_word} {score(ours, run.metric)} here, {score(theirs, run.metric)} there; "
        "no paired test was made for this metric."
    )


def heads(run: Run) -> Section:
    """Executed heads by layer and class, and the budget asked for."""
    title, budget = "Heads used by layer and class", run.main.get("budget") or {}
    layers = numbers(budget.get("k_over_h_per_layer"))
    known = [(v, i + 1) for i, v in enumerate(layers) if v is not None]
    if not known:
        return Section("heads", title, "No head counts were recorded.")
    classes = [c for c in budget.get("by_class") or [] if any(v is not None for v in _by_layer(c))]
    shown = sorted(classes, key=lambda c: -(number(c.get("rows")) or 0))[:_CLASSES]
    shown = [c for c in classes if c in shown]
    rows = [_heat("all texts", layers), *(_heat(str(c.get("label")), _by_layer(c)) for c in shown)]
    left_out = f" Of {len(classes)} classes, the {_CLASSES} largest." if len(classes) > len(shown) else ""
    columns = [f"layer {i + 1}" for i in range(len(layers))]
    note = f"Share of the {anything(budget.get('heads'))} heads that ran (k/H), the mean over texts.{left_out}"
    tables = [Table("l" + "c" * (len(layers) + 1), ["", *columns, "mean"], rows, "Heads run", note, marked=0)]
    asked, spread = numbers(budget.get("s_per_layer")), numbers(budget.get("s_std_per_layer"))
    if asked:
        body: list[list[str | Cell]] = [["mean s", *(decimal(v, 2) for v in asked)]]
        body += [["spread between texts (std)", *(decimal(v, 2) for v in spread)]] if spread else []
        note = "s is what the budget net asks for, from 0 to 1; rounding it to whole heads, with a minimum, gives k."
        tables.append(Table("l" + "r" * len(asked), ["", *columns[: len(asked)]], body, "Budget asked for", note))
    (top, busy), (bottom, idle) = max(known), min(known)
    lead = f"Layer {busy} runs the most heads ({share(top)}) and layer {idle} the fewest ({share(bottom)})"
    if top == bottom:
        lead = f"Every layer runs the same share of its heads ({share(top)})"
    ranked = sorted(((_mean(_by_layer(c)), str(c.get("label"))) for c in classes), key=lambda pair: pair[0])
    if len(ranked) > 1:
        lead += f"; by class the mean goes from {share(ranked[0][0])} (“{ranked[0][1]}”)"
        lead += f" to {share(ranked[-1][0])} (“{ranked[-1][1]}”)"
    return Section("heads", title, lead + ".", [], tables)


def _by_layer(item: dict[str, Any]) -> list[float | None]:
    return numbers(item.get("k_over_h_per_layer"))


def _mean(values: list[float | None]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / max(1, len(known))


def _heat(name: str, values: list[float | None]) -> list[str | Cell]:
    return [name, *(Cell(share(v, 0), v or 0.0) for v in [*values, _mean(values)])]


def cost(run: Run) -> Section:
    """FLOPs against the dense twin, the ceiling, and the paper's own count."""
    title, found = "Cost against the dense twin", run.main.get("cost") or {}
    ours, dense = number(found.get("flops_per_text")), number(found.get("flops_per_text_dense"))
    if ours is None or not dense:
        return Section("cost", title, "No cost was counted for this run.")
    part, ratio = number(found.get("attention_share_of_dense")), number(found.get("attention_flops_ratio"))
    rows: list[list[str | Cell]] = [["whole model", flops(ours), flops(dense), share(ours / dense)]]
    lead = f"A text costs {flops(ours)} FLOPs instead of {flops(dense)}, {share(ours / dense)} of the dense twin"
    if part is not None:
        if ratio is not None:
            rows.append(
                ["attention only, gates included", flops(ratio * part * dense), flops(part * dense), share(ratio)]
            )
        rows.append(["ceiling: if attention cost nothing", flops((1 - part) * dense), flops(dense), share(1 - part)])
        lead += (
            f"; attention is {share(part)} of a dense text's cost at these lengths, so no head budget could go below "
            f"{share(1 - part)}"
        )
    style = number(found.get("flops_per_text_paper_style"))
    if style is not None:
        rows.append(["same heads, but every projection computed", flops(style), flops(dense), share(style / dense)])
    tokens = decimal(found.get("mean_tokens"), 1)
    note = f"Counted, two FLOPs per multiply-accumulate, at the real lengths (mean {tokens} tokens)."
    head = ["FLOPs per text", "this model", "dense twin", "ratio"]
    tables = [Table("lrrr", head, rows, note=note, marked=0), *_papers_count(run)]
    return Section("cost", title, lead + ".", [], tables)


def _papers_count(run: Run) -> list[Table]:
    ours = number(dig(run.main, "cost", "papers_count_per_text"))
    theirs = number(dig(run.twin, "cost", "papers_count_per_text"))
    if ours is None:
        return []
    ratio = share(ours / theirs) if theirs else DASH
    note = (
        "One per multiply-accumulate, attention only, projections in full, the predicted s instead of the heads that "
        "ran: comparable with the paper's tables, not with the table above."
    )
    return [
        Table(
            "lrrr",
            ["per text", "this model", "dense twin", "ratio"],
            [["the paper's count", flops(ours), flops(theirs), ratio]],
            "The paper's own count (counted, not timed)",
            note,
        )
    ]


def provenance(run: Run) -> Section:
    """Recipe, data and environment: what it takes to make the same run again."""
    facts, trained = run.facts, run.facts.get("training") or {}
    cut = {str(k): v for k, v in (facts.get("cut") or {}).items() if v}
    data = [
        *flat(facts.get("data") or {}),
        ["columns", anything(facts.get("columns"))],
        *([f"{name} rows", whole(n)] for name, n in (facts.get("splits") or {}).items()),
        ["cut at", f"{anything(facts.get('max_length'))} tokens"],
        *([f"{name} texts cut", whole(n)] for name, n in cut.items()),
        ["fingerprint", anything(facts.get("data_fingerprint"))],
        *(["warning", str(w)] for w in facts.get("warnings") or []),
    ]
    training = [
        ["steps", f"{whole(trained.get('steps'))} of {whole(trained.get('planned_steps'))} planned"],
        ["epochs", f"{anything(trained.get('epochs'))}, best {anything(trained.get('best_epoch'))}"],
        ["stopped early", anything(trained.get("stopped_early"))],
        ["time", seconds(trained.get("seconds"))],
        ["tokens per second", whole(trained.get("tokens_per_second"))],
    ]
    model = [[k, whole(v) if k == "parameters" else anything(v)] for k, v in (facts.get("model") or {}).items()]
    recipe = [["seed", anything(facts.get("seed"))], *flat(facts.get("recipe") or {})]
    groups = [("Data", data), ("Model", model), ("Training", training), ("Recipe", recipe)]
    groups.append(("Environment", flat(facts.get("environment") or {})))
    tables = [Table("ll", [], [[*row] for row in rows], name) for name, rows in groups if rows]
    version = anything(dig(facts, "environment", "commit") or facts.get("budgetformer"))
    lead = f"The same data, recipe, seed ({anything(facts.get('seed'))}) and version ({version}) make this run again."
    return Section("made", "How it was made", lead, [], tables, beside=True)
