"""Writes docs/reference.md from the code: python docs/make_reference.py (a test sees that it was run)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

import budgetformer
from budgetformer.cli import app
from budgetformer.data.locate import DataSource

PAGE = Path(__file__).with_name("reference.md")
BELOW = {  # modules whose names are for users too; None: all that they export
    "budgetformer.nn": None,
    "budgetformer.data.locate": ("DataSource",),
    "budgetformer.data.dataset": ("open_data",),
    "budgetformer.data.tokens": ("encode_split",),
    "budgetformer.training.recipe": ("Recipe",),
    "budgetformer.engine.scores": ("Engine", "Scores", "score"),
    "budgetformer.evaluate": ("evaluate", "summarize"),
}
DATA_FLAGS = {field.name for field in fields(DataSource)} - {"data", "quarantine"}


def page() -> str:
    """The whole reference."""
    lines = ["# Reference", "", "Written from signatures, docstrings and help texts by `docs/make_reference.py`."]
    lines += ["", "## Python", "### `budgetformer`", *_names(budgetformer, budgetformer.__all__)]
    for name, chosen in BELOW.items():
        module = import_module(name)
        lines += ["", f"### `{name}`", *_names(module, chosen or module.__all__)]
    lines += ["", "## Command line", "[Exit codes](training.md#exit-codes) are the same for all verbs."]
    verbs = dict(_verbs(typer.main.get_command(app)))
    for name, verb in verbs.items():
        lines += ["", *_verb(name, verb)]
    flags = [p for p in verbs["train"].params if p.name in DATA_FLAGS]
    lines += ["", "### Data options", *_options(flags)]
    return "\n".join(lines) + "\n"


def _names(module: Any, names: Iterable[str]) -> Iterator[str]:
    for name in sorted(names, key=str.casefold):
        thing = getattr(module, name)
        about = "the version" if name == "__version__" else _first_paragraph(thing)
        yield f"- `{name}{_signature(thing)}`: {about}"


def _signature(thing: Any) -> str:
    """Names and defaults; of a class that inherits dozens of parameters only its own."""
    if not callable(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
        return ""
    ours = list(inspect.signature(thing).parameters.values())
    if len(ours) > 20 and isinstance(thing, type):
        inherited = inspect.signature(thing.__mro__[1]).parameters
        ours = [p for p in ours if p.name not in inherited]
    return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in ours]))


def _first_paragraph(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _verbs(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, verb in sorted(group.commands.items()):
        yield from _verbs(verb, f"{name} ") if hasattr(verb, "commands") else [(prefix + name, verb)]


def _verb(name: str, verb: Any) -> Iterator[str]:
    arguments = [p for p in verb.params if p.param_type_name == "argument"]
    options = [p for p in verb.params if p not in arguments]
    yield f"### `budgetformer {' '.join([name, *(p.metavar or p.name.upper() for p in arguments)])}`"
    yield from (_first_paragraph(verb.callback), "")
    yield from (f"- `{p.metavar or p.name.upper()}`: {p.help}" for p in arguments)
    shared = [p for p in options if p.name in DATA_FLAGS and p.rich_help_panel == "Data"]
    yield from _options(p for p in options if p not in shared)
    if shared:
        names = ", ".join(f"`{p.opts[0]}`" for p in shared)
        yield f"- and of the [data options](#data-options) {names}"


def _options(parameters: Iterable[Any]) -> Iterator[str]:
    for p in parameters:
        value = "" if p.is_flag else f" {p.metavar or p.name.upper()}"
        default = "" if p.is_flag or p.default is None else f" (default: {p.default})"
        yield f"- `{', '.join(p.opts)}{value}`: {p.help}{default}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
