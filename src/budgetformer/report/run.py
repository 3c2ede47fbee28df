"""The run as the sections see it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from budgetformer.report.numbers import METRIC_NAMES

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


def clipped(text: Any) -> str:
    words = "" if text is None else str(text)
    return words if len(words) <= _LONG else words[:_LONG].rstrip() + " …"


@dataclass(frozen=True)
class Run:
    """The JSON of one run; any part of it may be missing."""

    facts: dict[str, Any]
    history: list[dict[str, Any]]
    evaluation: dict[str, Any]
    baseline_history: list[dict[str, Any]]

    @property
    def main(self) -> dict[str, Any]:
        """The evaluation to speak about: test, or else validation."""
        return dig(self.evaluation, "test") or dig(self.evaluation, "validation") or {}

    @property
    def split(self) -> str:
        return str(self.main.get("split") or "test")

    @property
    def twin(self) -> dict[str, Any]:
        """The dense twin's evaluation on the same split."""
        which = "test" if dig(self.evaluation, "test") else "validation"
        return dig(self.evaluation, "baseline", which) or {}

    @property
    def metric(self) -> str:
        return str(self.main.get("metric") or "score")

    @property
    def metric_word(self) -> str:
        return METRIC_NAMES.get(self.metric, self.metric)

    def bounds(self) -> tuple[float | None, float | None]:
        """The 95 % interval of the score, where one is known."""
        quality = dig(self.main, "quality", self.metric)
        return number(dig(quality, "low")), number(dig(quality, "high"))
