"""What verbs print."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from budgetformer.evaluate import CHEAPER, pretrained_hint, words_suffice
from budgetformer.runs.files import read_json

if TYPE_CHECKING:
    from budgetformer.predict.job import Summary

# The rows of a comparison in evaluation.json, as people read them.
MODELS = {"words": "words alone", "dense twin": "dense twin", CHEAPER: CHEAPER, "learned": "learned", "full": "full"}


def print_json(data: Any) -> None:
    """Plain JSON, for programs."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def log(line: str) -> None:
    """A line on standard error, at once."""
    print(line, file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """One line, however long."""
    Console(highlight=False).print(text, soft_wrap=True)


def print_table(
    title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], left: Collection[str] = ("",)
) -> None:
    """Rows as `columns` formats them: by heading, a format such as "{speedup:.2f}x" for `str.format_map`.

    The columns named in `left` hold words, the others numbers, which stand to the right.
    """
    table = Table(title=title)
    for heading in columns:
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(*(cell.format_map(row).replace("%", " %") for cell in columns.values()))
    Console(highlight=False).print(table)


def print_result(result: dict[str, Any], folder: Path) -> None:
    """The closing table of a training run: words alone, the dense twin, and the model at its budgets."""
    ours, rates = result["test"] or result["validation"], result.get("rows_per_second", {})
    points = [{**p, "dial": MODELS[p["model"]], "rate": rates.get(p["model"])} for p in result["comparison"]]
    print_budgets(points, ours, f"{ours['rows']} {ours['split']} rows")
    if result["versus_baseline"]:
        print_line(f"BudgetFormer is {result['versus_baseline']['verdict']}.")
    twin = (result["baseline"] or {}).get(ours["split"])
    words = words_suffice((result["depth"] or {}).get("stages", ()), twin and twin["score"])
    for line in (words, pretrained_hint(read_json(folder / "run.json", "resume the run"))):
        if line:
            print_line(line)
    print_line(f"report: {folder / 'report.html'}")
    print_line(f"next:\n  budgetformer predict {folder} DATA -o answers.csv\n  budgetformer serve {folder}")


def print_seeds(summary: dict[str, Any]) -> None:
    """Mean and spread over seeds."""
    rows = [
        {**figures[name], "model": model, "figure": figures["metric"] if name == "score" else name}
        for model, figures in summary["models"].items()
        for name in ("score", "k_over_h", "flops_ratio")
    ]
    each = " ".join(f"{{values[{n}]:.4f}}" for n in range(len(summary["seeds"])))
    columns = {"model": "{model}", "figure": "{figure}", "mean": "{mean:.4f}", "std": "{std:.4f}", "each": each}
    print_table(f"seeds {', '.join(map(str, summary['seeds']))}", columns, rows, left=columns)


def print_evaluations(evaluations: list[dict[str, Any]], title: str) -> None:
    """One row for each position of the dial."""
    rows = []
    for e in evaluations:
        bounds = e["quality"].get(e["metric"])
        low, high = (bounds["low"], bounds["high"]) if isinstance(bounds, dict) else (None, None)
        cost = {**e["budget"], **e["cost"], "exits": e["exits"] and e["exits"]["share"]}
        rows.append({**cost, "dial": e["dial"], "score": e["score"], "low": low, "high": high})
    print_budgets(rows, evaluations[0], title)


def exits_heading(stages: Iterable[str]) -> str:
    """What `exits_shown` shows."""
    return f"% left at {' / '.join(stages)}"


def exits_shown(shares: Iterable[float] | None) -> str:
    """The share of texts that left at each stage, in percent."""
    return "/".join(f"{100 * share:.0f}" for share in shares or ())


def summary_line(summary: Summary, output: Path | None) -> str:
    """What predict has done: rows, their rate, and where and at which cost texts left."""
    before, rows = summary.rows - summary.rows_now, max(1, summary.rows)
    parts = [
        f"{summary.rows} rows" + (f" ({before} of them before)" if before else ""),
        f"{summary.rows_now / max(1e-9, summary.seconds):.0f} a second",
        f"{summary.cut} texts cut" if summary.cut else "no text cut",
    ]
    if summary.bad:
        parts.append(f"{summary.bad} bad rows set aside")
    if summary.dense_flops:
        parts.append(f"{100 * summary.flops / summary.dense_flops:.1f} % of the dense FLOPs")
        parts.append(f"{exits_heading(summary.stages)}: {exits_shown(texts / rows for texts in summary.exits)}")
    return ", ".join([*parts, *([str(output)] if output else [])])


def print_budgets(points: list[dict[str, Any]], first: dict[str, Any], title: str) -> None:
    """Score, cost and the share of texts per exit at each budget; `first` is the evaluation of one of them."""
    rows, exits = [], first["exits"]
    for point in points:
        interval = "" if point["low"] is None else f"{point['low']:.4f} to {point['high']:.4f}"
        rows.append({**point, "interval": interval, "leaving": exits_shown(point["exits"])})
    columns = {
        "budget": "{dial}", first["metric"]: "{score:.4f}", "95 % interval": "{interval}",
        "FLOPs of dense": "{flops_ratio:.1%}", "k/H": "{k_over_h:.3f}",
    }  # fmt: skip
    if "groups_run" in first["budget"] and all("groups_run" in point for point in points):
        columns["groups run"] = "{groups_run:.3f}"
    if points[0].get("rate"):
        columns["rows/s"] = "{rate:,.0f}"
    if exits:
        columns[exits_heading(exits["stages"])] = "{leaving}"
    print_table(title, columns, rows, left=["budget"])


def _points(versus: Mapping[str, float] | None) -> str:
    """An interval of a difference in points, or nothing."""
    return f"{100 * versus['low']:+.2f} to {100 * versus['high']:+.2f}" if versus else ""


def print_calibration(result: dict[str, Any], run: Path) -> None:
    """The curve of cost against agreement and quality, the stages, and the operating points with their names."""
    first = result["curve"][0]
    rows = [
        {**point, "paired": _points(point.get("versus_full")), "leaving": exits_shown(point.get("exits"))}
        for point in result["curve"]
    ]
    left_at = exits_heading(stage["stage"] for stage in result.get("stages", ()))
    optional = {
        "disagreement": ("other label", "{disagreement:.2%}"), "score": (first.get("metric", ""), "{score:.4f}"),
        "versus_full": ("against full, points", "{paired}"), "exits": (left_at, "{leaving}"),
        "ms_per_text": ("ms per text", "{ms_per_text:.2f}"),
    }  # fmt: skip
    columns = {"budget": "{dial}", "FLOPs": "{flops_ratio:.1%}", "k/H": "{k_over_h:.3f}"}
    columns |= dict(heading for key, heading in optional.items() if first.get(key) is not None)
    print_table(f"{run} on {result['rows']} {result['split']} rows of {result['data']}", columns, rows, left=["budget"])
    for line in stage_lines(result.get("stages") or []):
        print_line(line)
    for name, point in result["points"].items():
        print_line(f"--budget {name} is {point['dial']}: {point_line(point)}")
    if result["points"]:
        print_line(f"next: budgetformer predict {run} DATA --budget {next(iter(result['points']))}")


def stage_lines(stages: list[dict[str, Any]]) -> list[str]:
    """Which stages pay, and whether the words would do."""
    lines = []
    for stage in stages[:-1]:
        verdict = f"saves {stage['saves']:.1%} of the dense cost" if stage["saves"] > 0.005 else "does not pay"
        score = f"{stage['score']:.4f} by itself, " if "score" in stage else ""
        lines.append(f"{stage['stage']}: {score}{verdict}".replace("%", " %"))
    return [*lines, *filter(None, [words_suffice(stages)])]


def point_line(point: dict[str, Any]) -> str:
    """What a point costs and what it promises."""
    parts = [f"{point['flops_ratio']:.1%} of the dense FLOPs"]
    if "disagreement" in point:
        parts.append(f"another label for {point['disagreement']:.2%} of texts")
    if versus := point.get("versus_full"):
        parts.append(f"{100 * versus['value']:+.2f} points ({_points(versus)})")
    if promise := point.get("guarantee"):
        what = "other labels" if promise["kind"] == "disagreement" else "points lost"
        parts.append(f"at most {promise['limit']:.2%} {what} with {promise['confidence']:.0%} confidence")
    return ", ".join(parts).replace("%", " %")


def print_bench(result: dict[str, Any]) -> None:
    """Times, ratios and ceilings; where selective execution is slower, it says so."""
    title = "{threads} threads, {cpu}, torch {torch}".format_map(result["environment"])
    if "units" in result:
        columns = {
            "batch": "{batch}", "length": "{length}", "a head, ms": "{head_ms:.4f}",
            "a group, ms": "{group_ms:.4f}", "groups_price": "{groups_price:.3f}",
            "by FLOPs": "{flops_price:.3f}",
        }  # fmt: skip
        print_table(title, columns, result["units"])
        return
    times = {
        "what": "{what}", "batch": "{batch}", "length": "{length}", "k/H": "{k}/{heads}", "dense ms": "{dense_ms:.2f}",
        "selective ms": "{selective_ms:.2f}", "speed-up": "{speedup:.2f}x", "FLOPs allow": "{ideal:.2f}x",
        "": "{slower}",
    }  # fmt: skip
    if result["rows"]:
        rows = [{**row, "slower": "slower" if row["speedup"] < 1 else ""} for row in result["rows"]]
        print_table(title, times, rows, left=["what", ""])
    if result["memory"]:
        memory = {
            "batch": "{batch}", "length": "{length}", "heads": "{heads}", "attention block": "{block_mib:.0f}",
            "whole model": "{model_mib:.0f}",
        }  # fmt: skip
        rows = [{**row, "heads": "all (dense)" if row["k"] is None else row["k"]} for row in result["memory"]]
        print_table("peak memory of one forward pass above the model, MiB, fresh processes", memory, rows)


def print_engines(result: dict[str, Any]) -> None:
    """Engines beside each other, from text to label."""
    first = result["engines"][0]
    columns = {"engine": "{engine}"}
    columns |= {f"rows/s, batch {batch}": f"{{rows_per_second[{batch}]:.0f}}" for batch in first["rows_per_second"]}
    columns |= {first["metric"]: "{score:.4f}"} if "metric" in first else {}
    columns |= {"FLOPs of dense": "{flops_ratio:.1%}", "other label than torch": "{other_labels:.2%}"}
    title = "{run} at {budget}, {threads} threads, from text to label: {texts} texts timed, {rows} {split} rows scored"
    print_table(title.format_map(result), columns, result["engines"], left=["engine"])
    costs = ", ".join(f"{ratio - 1:+.1%} at batch {batch}" for batch, ratio in result["splitting"].items())
    print_line(f"One graph for each stage instead of one for all, every text through all of them: {costs} in time.")


def print_run_bench(result: dict[str, Any]) -> None:
    """A run against its dense twin, from text to label."""
    columns = {
        "batch": "{batch}", "dense ms": "{dense_ms:.0f}", "selective ms": "{selective_ms:.0f}",
        "speed-up": "{speedup:.2f}x", "texts/s": "{texts_per_second:.0f}",
    }  # fmt: skip
    print_table("{texts} {split} texts of {run}, from text to label".format_map(result), columns, result["rows"])
    limits = "k/H {k_over_h:.3f}: FLOPs allow {ideal:.2f}x; without any attention it would be {ceiling:.2f}x."
    print_line(limits.format_map(result))
    for name, energy in (result["energy"] or {}).items():
        print_line(
            f"{name}: {energy['joules']:.1f} J and {energy['grams_co2']:.4f} g CO2 per thousand texts, "
            f"{energy['source']}; intensity: {energy['intensity']}"
        )
