"""A run's README.md: the model card, written from its JSON results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from budgetformer.runs.files import named_write_errors


def write_card(folder: Path, record: dict[str, Any], result: dict[str, Any]) -> Path:
    """Write README.md beside the model: what it is, how good, what it costs, how to load it."""
    path = folder / "README.md"
    with named_write_errors(path):
        path.write_text("\n".join(_lines(record, result)) + "\n", encoding="utf-8")
    return path


def _lines(record: dict[str, Any], result: dict[str, Any]) -> list[str]:
    final = result["test"] or result["validation"]
    model, training, budget, cost = record["model"], record["training"], final["budget"], final["cost"]
    rows = ", ".join(f"{count:,} {name}" for name, count in record["splits"].items())
    lines = [
        "---",
        "library_name: budgetformer",
        "pipeline_tag: text-classification",
        "---",
        f"# {record['name']}",
        "",
        f"A {model['layers']}-layer Transformer of width {model['width']} with {model['heads']} heads a layer, "
        f"{model['parameters']:,} parameters, head allocation `{model['allocator']}`, trained by budgetformer "
        f"{record['budgetformer']} on `{record['data']['data']}` ({rows} rows).",
        "",
        "| | |",
        "| --- | --- |",
        f"| {final['metric'].replace('_', ' ')} on {final['split']} ({final['rows']:,} rows) | {_score(final)} |",
        f"| heads executed, k/H | {budget['k_over_h']:.3f} |",
        f"| FLOPs a text, counted, of the dense model's | {100 * cost['flops_ratio']:.1f} % |",
        f"| training | {training['epochs']} epochs, {training['steps']:,} steps, {training['seconds'] / 60:.1f} min |",
    ]
    if result["versus_baseline"]:
        lines += ["", f"This model is {result['versus_baseline']['verdict']}."]
    if record["labels"]:
        lines += ["", f"Labels: {', '.join(f'`{label}`' for label in record['labels'][:50])}."]
    lines += ["", "## Use", "```python"]
    room = "modeling" if record["recipe"].get("base") is None else "retrofit"
    lines += [f"import budgetformer.{room}", "from transformers import pipeline", ""]
    lines += ['classify = pipeline("text-classification", model="PATH/TO/THIS/DIRECTORY")', 'classify("a text")', "```"]
    if record["warnings"]:
        lines += ["", "## Warnings about the data", *(f"- {warning}" for warning in record["warnings"])]
    return [*lines, "", "All figures are from evaluation.json; how it was made is in run.json; report.html shows both."]


def _score(evaluation: dict[str, Any]) -> str:
    interval = evaluation["quality"].get(evaluation["metric"])
    if isinstance(interval, dict):
        return f"{evaluation['score']:.4f} (95 % interval {interval['low']:.4f} to {interval['high']:.4f})"
    return f"{evaluation['score']:.4f}"
