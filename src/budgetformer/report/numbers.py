"""Numbers as people read them. None, NaN and infinity all read as a dash."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

DASH = "–"
METRIC_NAMES = {"accuracy": "accuracy", "micro_f1": "micro F1", "r2": "R²", "mse": "mean squared error"}
METRIC_NAMES |= {"exact_match": "all labels right"}
PERCENT_METRICS = ("accuracy", "exact_match")


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def format_decimal(value: float | None, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if _is_known(value) else DASH


def format_percent(value: float | None, digits: int = 1) -> str:
    """0.226 -> 22.6 %."""
    return f"{100 * value:.{digits}f}\N{NO-BREAK SPACE}%" if _is_known(value) else DASH


def format_count(value: float | None) -> str:
    """12345 -> 12,345."""
    return f"{value:,.0f}" if _is_known(value) else DASH


def format_flops(value: float | None) -> str:
    """1.23e7 -> 12.3 M."""
    if not _is_known(value):
        return DASH
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            digits = ".3g" if value / size < 1000 else ".0f"
            return f"{value / size:{digits}}\N{NO-BREAK SPACE}{unit}"
    return f"{value:.0f}"


def format_score(value: float | None, metric: str) -> str:
    """A score in its metric's own unit: accuracy as a percentage, F1 and R² as decimals."""
    return format_percent(value) if metric in PERCENT_METRICS else format_decimal(value)


def format_interval(low: float | None, high: float | None, metric: str) -> str:
    """ "90.4 to 91.7 %", or nothing where there is none."""
    if not (_is_known(low) and _is_known(high)):
        return ""
    return f"{format_score(low, metric).removesuffix('%').rstrip()} to {format_score(high, metric)}"


def format_seconds(value: float | None) -> str:
    if not _is_known(value):
        return DASH
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def format_value(value: Any) -> str:
    """A JSON value in one line: lists joined, None as a dash."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or "none"
    return str(value)


def flatten(tree: dict[str, Any], prefix: str = "") -> list[list[str]]:
    """A nested dict as rows of dotted name and value."""
    rows = []
    for key, value in tree.items():
        name = f"{prefix}.{key}".lstrip(".")
        rows += flatten(value, name) if isinstance(value, dict) else [[name, format_value(value)]]
    return rows
