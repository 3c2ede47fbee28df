"""What verbs print on standard output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def quiet_libraries() -> None:
    """Silence the progress bars that transformers draws for every file; a command line may, a library may not."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def print_json(data: Any) -> None:
    """Plain JSON, for programs."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_result(result: dict[str, Any], folder: Path) -> None:
    """The closing table of a training run: BudgetFormer beside its dense twin."""
    console = Console(highlight=False)
    ours = result["test"] or result["validation"]
    twin = (result["baseline"] or {}).get(ours["split"])
    table = Table(title=f"{ours['rows']} {ours['split']} rows")
    table.add_column("")
    table.add_column("BudgetFormer", justify="right")
    if twin:
        table.add_column("dense twin", justify="right")
    for name, figure in _figures(ours):
        table.add_row(name, figure, *([dict(_figures(twin))[name]] if twin else []))
    console.print(table)
    if result["versus_baseline"]:
        console.print(f"BudgetFormer is {result['versus_baseline']['verdict']}.", soft_wrap=True)
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)


def _figures(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    metric, quality, cost = evaluation["metric"], evaluation["quality"], evaluation["cost"]
    interval = quality.get(metric)
    score = f"{evaluation['score']:.4f}"
    if isinstance(interval, dict):
        score += f" ({interval['low']:.4f} to {interval['high']:.4f})"
    figures = [(metric.replace("_", " "), score)]
    if "macro_f1" in quality and metric != "macro_f1":
        figures.append(("macro F1", f"{quality['macro_f1']:.4f}"))
    layers = " ".join(f"{share:.2f}" for share in evaluation["budget"]["k_over_h_per_layer"])
    return [
        *figures,
        ("mean s (predicted)", f"{evaluation['budget']['s_mean']:.3f}"),
        ("heads executed, k/H", f"{evaluation['budget']['k_over_h']:.3f}"),
        ("k/H by layer", layers),
        ("FLOPs a text (counted)", f"{cost['flops_per_text']:.3e}"),
        ("of the dense twin's", f"{100 * cost['flops_ratio']:.1f} %"),
        ("least that head budgets allow", f"{100 * (1 - cost['attention_share_of_dense']):.1f} %"),
    ]


def print_seeds(summary: dict[str, Any]) -> None:
    """Mean and spread over seeds."""
    table = Table(title=f"seeds {', '.join(map(str, summary['seeds']))}")
    for heading in ("model", "figure", "mean", "std", "each"):
        table.add_column(heading)
    for model, figures in summary["models"].items():
        for name, spread in figures.items():
            if isinstance(spread, dict):
                label = figures["metric"] if name == "score" else name
                each = " ".join(f"{v:.4f}" for v in spread["values"])
                table.add_row(model, label, f"{spread['mean']:.4f}", f"{spread['std']:.4f}", each)
    Console(highlight=False).print(table)


def print_evaluations(evaluations: list[dict[str, Any]], title: str) -> None:
    """One row for each position of the dial."""
    table = Table(title=title)
    for heading in ("budget", evaluations[0]["metric"], "95 % interval", "mean s", "k/H", "FLOPs of dense"):
        table.add_column(heading, justify="left" if heading == "budget" else "right")
    for e in evaluations:
        interval = e["quality"].get(e["metric"])
        between = f"{interval['low']:.4f} to {interval['high']:.4f}" if isinstance(interval, dict) else ""
        budget, cost = e["budget"], e["cost"]
        table.add_row(
            e["dial"], f"{e['score']:.4f}", between, f"{budget['s_mean']:.3f}", f"{budget['k_over_h']:.3f}",
            f"{100 * cost['flops_ratio']:.1f} %",
        )  # fmt: skip
    Console(highlight=False).print(table)


def print_calibration(result: dict[str, Any], run: Path) -> None:
    """The dial's curve, and the operating points with their names."""
    console, curve = Console(highlight=False), result["curve"]
    table = Table(title=f"{run} on {result['rows']} {result['split']} rows")
    timed = any(p["ms_per_text"] is not None for p in curve)
    headings = ["budget", curve[0]["metric"], "95 % interval", "against all heads", "k/H", "attention FLOPs", "FLOPs"]
    for heading in [*headings, *(["ms a text"] if timed else [])]:
        table.add_column(heading, justify="left" if heading == "budget" else "right")
    for p in curve:
        between = f"{p['low']:.4f} to {p['high']:.4f}" if p["low"] is not None else ""
        versus = p["versus_full"]
        paired = f"{100 * versus['low']:+.2f} to {100 * versus['high']:+.2f}" if versus else ""
        table.add_row(
            p["dial"], f"{p['score']:.4f}", between, paired, f"{p['k_over_h']:.3f}",
            f"{100 * p['attention_flops_ratio']:.1f} %", f"{100 * p['flops_ratio']:.1f} %",
            *([f"{p['ms_per_text']:.2f}"] if timed else []),
        )  # fmt: skip
    console.print(table)
    for name, point in result["points"].items():
        console.print(f"--budget {name} is {point['dial']}: {point['metric']} {point['score']:.4f}", soft_wrap=True)


def print_bench(result: dict[str, Any]) -> None:
    """Times, ratios and ceilings; where selective execution is slower, it says so."""
    console = Console(highlight=False)
    machine = result["environment"]
    if result["rows"]:
        table = Table(title=f"{machine['threads']} threads, {machine['cpu']}, torch {machine['torch']}")
        for heading in ("what", "batch", "length", "k/H", "dense ms", "selective ms", "speed-up", "FLOPs allow", ""):
            table.add_column(heading, justify="left" if heading in ("what", "") else "right")
        for row in result["rows"]:
            table.add_row(
                row["what"], str(row["batch"]), str(row["length"]), f"{row['k']}/{row['heads']}",
                f"{row['dense_ms']:.2f}", f"{row['selective_ms']:.2f}", f"{row['speedup']:.2f}x",
                f"{row['ideal']:.2f}x", "slower" if row["speedup"] < 1 else "",
            )  # fmt: skip
        console.print(table)
    if result["memory"]:
        table = Table(title="peak memory of one forward pass above the model, MiB, fresh processes")
        for heading in ("batch", "length", "heads", "attention block", "whole model"):
            table.add_column(heading, justify="right")
        for row in result["memory"]:
            heads = "all (dense)" if row["k"] is None else str(row["k"])
            table.add_row(
                str(row["batch"]), str(row["length"]), heads, f"{row['block_mib']:.0f}", f"{row['model_mib']:.0f}"
            )
        console.print(table)


def print_run_bench(result: dict[str, Any]) -> None:
    """A run against its dense twin, from text to label."""
    console = Console(highlight=False)
    table = Table(title=f"{result['texts']} {result['split']} texts of {result['run']}, from text to label")
    for heading in ("batch", "dense ms", "selective ms", "speed-up", "texts/s"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            str(row["batch"]), f"{row['dense_ms']:.0f}", f"{row['selective_ms']:.0f}", f"{row['speedup']:.2f}x",
            f"{row['texts_per_second']:.0f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"k/H {result['k_over_h']:.3f}: FLOPs allow {result['ideal']:.2f}x; without any attention it would be "
        f"{result['ceiling']:.2f}x.", soft_wrap=True,
    )  # fmt: skip
    for name, energy in (result["energy"] or {}).items():
        console.print(
            f"{name}: {energy['joules']:.1f} J and {energy['grams_co2']:.4f} g CO2 a thousand texts, "
            f"{energy['source']}; intensity: {energy['intensity']}", soft_wrap=True,
        )  # fmt: skip
