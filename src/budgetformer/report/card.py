"""A run's README.md: the model card, from its JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from budgetformer.report.kit import environment, escape_markdown
from budgetformer.report.run import Run
from budgetformer.runs.files import write_text

if TYPE_CHECKING:
    from markupsafe import Markup


def write_card(folder: Path) -> Path:
    """Write README.md into a finished run: what it is, how good, what it costs, how to load it."""
    run, markdown, target = Run.read(folder), environment(escape=escape_markdown), folder / "README.md"
    markdown.filters["code"] = _code_span
    card = markdown.get_template("card.md").render(record=run.record, final=run.final, verdict=run.verdict)
    write_text(target, card)
    return target


def _code_span(text: str) -> Markup:
    """Any text as code, on one line, between more backticks than it has in a row."""
    from markupsafe import Markup

    text = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}")
