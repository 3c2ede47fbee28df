"""budgetformer check: what is in a data set, and what would go wrong with it."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from budgetformer.cli import app
from budgetformer.cli.data_flags import TABLES, takes_data
from budgetformer.data.locate import DataSource

CLASSES_SHOWN = 20


@app.command()
@takes_data(*TABLES)
def check(
    source: DataSource,
    tokenizer: str | None = typer.Option(
        None, "--tokenizer", help="A tokenizer (name, directory, vocabulary file) to count tokens exactly."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on standard output."),
) -> None:
    """Look at data before training on it: rows, classes, duplicates, leakage, bad rows, lengths.

    The exit code is 0 if the data can be trained on as it is, 3 if not.
    """
    from budgetformer.data.check import check_data
    from budgetformer.data.tokenizer import load_tokenizer

    report = check_data(
        source, load_tokenizer(tokenizer, offline=source.offline).backend_tokenizer if tokenizer else None
    )
    report["next"] = train_command(source, tokenizer) if report["usable"] else None
    print(json.dumps(report, indent=2) if as_json else render(report))
    if not report["usable"]:
        raise typer.Exit(3)


def train_command(source: DataSource, tokenizer: str | None) -> str:
    """The command that trains on what was checked."""
    words = ["budgetformer", "train", source.data]
    for field in fields(DataSource):
        value = getattr(source, field.name)
        if field.name in TABLES and value != field.default:
            value = source.quarantine or value if field.name == "bad_rows" else value
            words += ["--" + field.name.replace("_", "-"), *([] if value is True else [value])]
    words += ["--tokenizer", tokenizer] if tokenizer else []
    name = Path(source.data.replace(":", "/")).name.partition(".")[0].strip("-")
    return shlex.join([*words, "-o", f"runs/{name or 'run'}"])


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [f"{report['data']}: {report['task']}, {report['columns']}"]
    for name, split in report["splits"].items():
        lines += ["", *_split(name, split)]
    if set(report["splits"]) == {"train"}:
        lines += ["", "validation and test will be carved out of train (--validation, --test to give files)"]
    lines.append("")
    if report["leakage"] and not any(leak["rows"] for leak in report["leakage"]):
        lines.append("no row of one split occurs in another")
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    lines += [f"error: {error}" for error in report["errors"]]
    lines.append(f"lengths in tokens, {report['lengths_by']}")
    lines.append(f"usable; next: {report['next']}" if report["usable"] else "NOT usable as it is")
    return "\n".join(lines)


def _split(name: str, split: dict[str, Any]) -> list[str]:
    lines = [f"{name}  {split['rows']:,} rows  ({split['file']})"]
    total = max(1, split["rows"])
    largest_first = sorted(split["classes"].items(), key=lambda item: -item[1])
    for label, rows in largest_first[:CLASSES_SHOWN]:
        lines.append(f"  {label[:24]:24} {rows:>10,}  {rows / total:6.1%}  {_bar(rows / total)}")
    if len(largest_first) > CLASSES_SHOWN:
        lines.append(f"  and {len(largest_first) - CLASSES_SHOWN} smaller classes")
    lines.append(f"  duplicates {split['duplicates']:,}, bad rows {sum(split['bad'].values()):,}")
    lines += [f"    {kind}: {count:,}" for kind, count in split["bad"].items()]
    lines += [f"    line {bad['line']}: {bad['reason']}" for bad in split["first_bad"]]
    lines.append("  cut at " + ", ".join(f"{most}: {share:.1%}" for most, share in split["cut"].items()))
    most = max((part["rows"] for part in split["lengths"]), default=1)
    for part in split["lengths"]:
        lines.append(f"  {part['from']:>6}-{part['to']:<6} {part['rows']:>10,}  {_bar(part['rows'] / most)}")
    return lines


def _bar(share: float, width: int = 30) -> str:
    return "█" * round(share * width) or ("▏" if share else "")
