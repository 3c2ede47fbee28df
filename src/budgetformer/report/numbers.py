"""Numbers as people read them. None, NaN and infinity all read as a dash."""

from __future__ import annotations

import math
from typing import Any

DASH = "–"
METRICS = {"accuracy": "accuracy", "micro_f1": "micro F1", "r2": "R²", "mse": "mean squared error"}
METRICS |= {"exact_match": "all labels right"}
SHARES = ("accuracy", "exact_match")
_LONG = 600  # characters of one text that are shown


def dig(tree: Any, *keys: str) -> Any:
    """The value under nested keys, or None as soon as one is missing."""
    for key in keys:
        if not isinstance(tree, dict):
            return None
        tree = tree.get(key)
    return tree


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def numbers(values: Any) -> list[float | None]:
    return [number(v) for v in values] if isinstance(values, list) else []


def share(value: Any, digits: int = 1) -> str:
    """0.226 -> 22.6 %."""
    v = number(value)
    return DASH if v is None else f"{100 * v:.{digits}f}\N{NO-BREAK SPACE}%"


def decimal(value: Any, digits: int = 3) -> str:
    v = number(value)
    return DASH if v is None else f"{v:.{digits}f}"


def whole(value: Any) -> str:
    """12345 -> 12,345."""
    v = number(value)
    return DASH if v is None else f"{v:,.0f}"


def flops(value: Any) -> str:
    """1.23e7 -> 12.3 M."""
    v = number(value)
    if v is None:
        return DASH
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(v) >= size:
            return f"{v / size:.3g}\N{NO-BREAK SPACE}{unit}" if v / size < 1000 else f"{v / size:.0f} {unit}"
    return f"{v:.0f}"


def score(value: Any, metric: str) -> str:
    """A score in its metric's own unit: accuracy as a percentage, F1 and R² as decimals."""
    return share(value) if metric in SHARES else decimal(value)


def interval(low: Any, high: Any, metric: str) -> str:
    """ "90.4 to 91.7 %", or nothing where there is none."""
    if number(low) is None or number(high) is None:
        return ""
    a, b = score(low, metric), score(high, metric)
    return f"{a.removesuffix('%').rstrip()} to {b}"


def seconds(value: Any) -> str:
    v = number(value)
    if v is None:
        return DASH
    if v < 120:
        return f"{v:.0f} s"
    return f"{v / 60:.0f} min" if v < 7200 else f"{v / 3600:.1f} h"


def anything(value: Any) -> str:
    """A JSON value in one line: lists joined, None as a dash."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(anything(v) for v in value) or "none"
    return str(value)


def clipped(text: Any) -> str:
    words = "" if text is None else str(text)
    return words if len(words) <= _LONG else words[:_LONG].rstrip() + " …"


def flat(tree: Any, prefix: str = "") -> list[list[str]]:
    """A nested dict as rows of dotted name and value."""
    if not isinstance(tree, dict):
        return [[prefix, anything(tree)]] if prefix else []
    return [row for key, value in tree.items() for row in flat(value, f"{prefix}.{key}".lstrip("."))]
