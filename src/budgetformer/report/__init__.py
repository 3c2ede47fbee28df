"""A run's JSON -> one self-contained page, and its model card. Nothing here touches a model or the data."""

from __future__ import annotations

from pathlib import Path

from budgetformer.runs.files import COPY_AGAIN, named_read_errors, write_text

__all__ = ["write_card", "write_report"]


def write_report(folder: Path) -> Path:
    """Write report.html into a finished run, all at once, from its JSON; return its path.

    The same JSON gives the same bytes. The curves of the dense twin in baseline/ join in where it exists.
    """
    from budgetformer.report.page import report  # matplotlib is heavy

    with named_read_errors(folder / "evaluation.json", COPY_AGAIN):  # or history.jsonl, or run.json
        write_text(folder / "report.html", report(folder))
    return folder / "report.html"


def write_card(folder: Path) -> Path:
    """Write README.md into a finished run: what it is, how good, what it costs, how to load it."""
    from budgetformer.report.page import card

    with named_read_errors(folder / "evaluation.json", COPY_AGAIN):
        write_text(folder / "README.md", card(folder))
    return folder / "README.md"
