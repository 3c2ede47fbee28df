"""What a page is made of, and the run as the sections see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from budgetformer.report.numbers import METRICS, dig, number


@dataclass(frozen=True)
class Cell:
    """A table's cell that is shaded, from 0 (not at all) to 1."""

    text: str
    shade: float


@dataclass(frozen=True)
class Table:
    """`align` has one letter a column: l for words, r for numbers, c for a heat map."""

    align: str
    head: list[str]
    rows: list[list[str | Cell]]
    title: str = ""
    note: str = ""
    marked: int = -1  # the row to stress


@dataclass(frozen=True)
class Section:
    """A heading, one sentence that says what to see, and the pictures and tables that show it."""

    anchor: str
    title: str
    lead: str
    figures: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    beside: bool = False  # a wide window shows figures and tables side by side


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
        return METRICS.get(self.metric, self.metric)

    def bounds(self) -> tuple[float | None, float | None]:
        """The 95 % interval of the score, where one is known."""
        quality = dig(self.main, "quality", self.metric)
        return number(dig(quality, "low")), number(dig(quality, "high"))
