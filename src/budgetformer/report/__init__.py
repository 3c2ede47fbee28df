"""A run's JSON -> one self-contained page. Nothing here touches a model or the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from budgetformer.errors import ModelError
from budgetformer.runs.files import write_text

__all__ = ["write_report"]


def write_report(run: Path) -> Path:
    """Write RUN/report.html, all at once, from RUN/run.json, history.jsonl and evaluation.json; return its path.

    The same JSON gives the same bytes. RUN/baseline/history.jsonl joins the curves where it exists.
    """
    facts, evaluation = _read_object(run / "run.json"), _read_object(run / "evaluation.json")
    history = _read_lines(run / "history.jsonl")
    twin = run / "baseline" / "history.jsonl"
    baseline_history = _read_lines(twin) if twin.exists() else []

    from budgetformer.report.page import render  # matplotlib is heavy

    target = run / "report.html"
    write_text(target, render(facts, history, evaluation, baseline_history))
    return target


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(f"{file} does not exist: a report needs the directory of a finished training run") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read ({error}): restore it or train again") from error


def _read_object(file: Path) -> dict[str, Any]:
    return _parse(_text(file), str(file))


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [_parse(line, f"{file} line {n}") for n, line in enumerate(_text(file).split("\n"), 1) if line.strip()]


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{where} is not JSON ({error}): restore it or train again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where} holds {type(value).__name__}, not a JSON object: restore it or train again")
    return value
