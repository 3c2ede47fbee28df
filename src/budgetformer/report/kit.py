"""What pages are made of: sections, tables, cells, and the one way to fill a template."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Cell:
    """A table's cell that is more than its text: shaded from 0 to 1, or with a small line below."""

    text: str
    shade: float | None = None
    below: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """`align` has one letter per column: l for words, r for numbers, c for a heat map. table.html shows it."""

    align: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
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


def environment(*folders: Path, escape: Callable[[str], str] | None = None, **syntax: Any) -> Environment:
    """Templates in `folders` and in this one; a missing name is an error. Every value passes `escape`, or HTML's."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    return Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=escape is None, **syntax,
        finalize=None if escape is None else lambda v: v if isinstance(v, Markup) else escape(str(v)),
    )  # fmt: skip


def escape_markdown(text: str) -> str:
    """Plain text that GitHub shows as it is, on one line."""
    text = re.sub(r"([\\`*\[\]~|]|(?<!\w)_|_(?!\w)|^[#+-](?=\s))", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")
