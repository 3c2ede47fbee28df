"""What verbs print."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


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


def _interval(evaluation: Mapping[str, Any]) -> str:
    """The score's 95 % interval, or nothing."""
    bounds = evaluation["quality"].get(evaluation["metric"])
    return f"{bounds['low']:.4f} to {bounds['high']:.4f}" if isinstance(bounds, dict) else ""


def print_result(result: dict[str, Any], folder: Path) -> None:
    """The closing table of a training run: BudgetFormer beside its dense twin."""
    ours = result["test"] or result["validation"]
    models = {"BudgetFormer": _figures(ours)}
    if result["baseline"]:
        models["dense twin"] = _figures(result["baseline"][ours["split"]])
    rows = [
        {"name": name, **{model: figures.get(name, "") for model, figures in models.items()}} for name in _figures(ours)
    ]
    columns = {"": "{name}", **{model: f"{{{model}}}" for model in models}}
    print_table(f"{ours['rows']} {ours['split']} rows", columns, rows)
    if result["versus_baseline"]:
        print_line(f"BudgetFormer is {result['versus_baseline']['verdict']}.")
    print_line(f"report: {folder / 'report.html'}")
    print_line(f"next: budgetformer predict {folder} DATA -o answers.csv, or budgetformer serve {folder}")


def _figures(evaluation: dict[str, Any]) -> dict[str, str]:
    quality, budget, cost = evaluation["quality"], evaluation["budget"], evaluation["cost"]
    interval, fitted = _interval(evaluation), "{error:.4f} (before: {error_before:.4f})"
    exits = evaluation["exits"] or {}
    if exits:
        shares = (f"{name} {share:.1%}" for name, share in zip(exits["stages"], exits["share"], strict=True))
        layers = f"{exits['layers']:.2f} of {exits['depths'][-1]}"
        exits = {"texts that leave at": ", ".join(shares), "layers run": layers}
    return {
        evaluation["metric"].replace("_", " "): f"{evaluation['score']:.4f}{interval and f' ({interval})'}",
        **({"macro F1": f"{quality['macro_f1']:.4f}"} if "macro_f1" in quality else {}),
        **({"calibration error": fitted.format_map(quality["calibration"])} if "calibration" in quality else {}),
        "mean s (predicted)": f"{budget['s_mean']:.3f}",
        "heads executed, k/H": f"{budget['k_over_h']:.3f}",
        "k/H by layer": " ".join(f"{share:.2f}" for share in budget["k_over_h_per_layer"]),
        **exits,
        "FLOPs per text (counted)": f"{cost['flops_per_text']:.3e}",
        "of the dense twin's": f"{cost['flops_ratio']:.1%}",
        "least that head budgets allow": f"{1 - cost['attention_share_of_dense']:.1%}",
    }


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
    columns = {
        "budget": "{dial}", evaluations[0]["metric"]: "{score:.4f}", "95 % interval": "{interval}",
        "mean s": "{budget[s_mean]:.3f}", "k/H": "{budget[k_over_h]:.3f}", "FLOPs of dense": "{cost[flops_ratio]:.1%}",
    }  # fmt: skip
    if any("s_mean" not in e["budget"] for e in evaluations):  # an export does not know it
        del columns["mean s"]
    print_table(title, columns, [{**e, "interval": _interval(e)} for e in evaluations], left=["budget"])


def _points(versus: Mapping[str, float] | None) -> str:
    """An interval of a difference in points, or nothing."""
    return f"{100 * versus['low']:+.2f} to {100 * versus['high']:+.2f}" if versus else ""


def print_calibration(result: dict[str, Any], run: Path) -> None:
    """The curve of cost against agreement and quality, the stages, and the operating points with their names."""
    first = result["curve"][0]
    rows = [
        {
            **point,
            "paired": _points(point.get("versus_full")),
            "leaving": " ".join(f"{share:.0%}" for share in point.get("exits") or ()),
        }
        for point in result["curve"]
    ]
    names = " | ".join(stage["stage"] for stage in result.get("stages", ()))
    optional = {
        "disagreement": ("other label", "{disagreement:.2%}"), "score": (first.get("metric", ""), "{score:.4f}"),
        "versus_full": ("against full, points", "{paired}"), "exits": (f"leaving at {names}", "{leaving}"),
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
    words = stages[0] if stages and stages[0]["layers"] == 0 else None
    if words and words.get("versus_full") and words["versus_full"]["low"] > -0.005:
        lines.append(
            f"these data do not need a Transformer: the words alone reach {words['score']:.4f}, the full model "
            f"{stages[-1]['score']:.4f}, and the difference is below half a point"
        )
    return lines


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
    times = {
        "what": "{what}", "batch": "{batch}", "length": "{length}", "k/H": "{k}/{heads}", "dense ms": "{dense_ms:.2f}",
        "selective ms": "{selective_ms:.2f}", "speed-up": "{speedup:.2f}x", "FLOPs allow": "{ideal:.2f}x",
        "": "{slower}",
    }  # fmt: skip
    if result["rows"]:
        title = "{threads} threads, {cpu}, torch {torch}".format_map(result["environment"])
        rows = [{**row, "slower": "slower" if row["speedup"] < 1 else ""} for row in result["rows"]]
        print_table(title, times, rows, left=["what", ""])
    if result["memory"]:
        memory = {
            "batch": "{batch}", "length": "{length}", "heads": "{heads}", "attention block": "{block_mib:.0f}",
            "whole model": "{model_mib:.0f}",
        }  # fmt: skip
        rows = [{**row, "heads": "all (dense)" if row["k"] is None else row["k"]} for row in result["memory"]]
        print_table("peak memory of one forward pass above the model, MiB, fresh processes", memory, rows)


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
