"""A run's JSON -> one self-contained page, and its model card. Nothing here touches a model or the data."""

from __future__ import annotations

from pathlib import Path

from budgetformer.runs.files import write_text

__all__ = ["write_report"]


def write_report(folder: Path) -> Path:
    """Write report.html into a finished run, all at once, from its JSON; return its path.

    The same JSON gives the same bytes. The curves of the dense twin in baseline/ join in where it exists.
    """
    from budgetformer.report.page import render  # matplotlib is heavy
    from budgetformer.report.run import Run

    target = folder / "report.html"
    write_text(target, render(Run.read(folder)))
    return target
