"""The flags that say what data to read, the same for every verb that reads data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import typer

from budgetformer.data.locate import DataSource

BUDGET = "learned, full, fixed:X, max:X, mean:X, or an operating point's name (see calibrate)."
HELP = {
    "data": "A CSV, TSV, JSON lines (also .gz, .xz) or Parquet file, a directory of train/validation/test files, "
    "a named data set (imdb, ag_news, dbpedia_14, snli, yelp_review_full), demo:imdb, demo:rotten_tomatoes, "
    "hub:OWNER/NAME[:CONFIG], or - for standard input.",
    "validation": "A validation file, or 'test' to use the test set for it (the paper's way).",
    "test": "A test file.",
    "text": "The column of the text.",
    "text_pair": "The column of a second text.",
    "label": "The column of the label; a,b,c for several columns of 0 or 1.",
    "task": "auto, single, multi or regression.",
    "label_separator": "What separates several labels in one column.",
    "encoding": "The files' encoding.",
    "bad_rows": "error: stop at the first bad row; skip: set bad rows aside.",
    "quarantine": "Where bad rows are set aside (default: NAME.bad.jsonl here).",
    "validation_fraction": "The share of the training rows to validate on, where no validation set is given.",
    "test_fraction": "The share of the rows to test on, where neither validation nor test set is given.",
    "seed": "The seed of everything random.",
    "data_dir": "A directory with the named data sets in folders (or BUDGETFORMER_DATA).",
    "offline": "Never use the network.",
    "limit": "Use at most this many training rows.",
}


def takes_data(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb whose first parameter is a DataSource the flags that make one.

    The verb's own arguments (parameters without a default) come before DATA, its own options after the data flags.
    """
    hints = get_type_hints(verb, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in list(inspect.signature(verb).parameters.values())[1:]]
    types = get_type_hints(DataSource)
    names = [field.name for field in fields(DataSource)]
    flags = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=types[field.name],
                          default=_flag(field.name, field.default))
        for field in fields(DataSource)
    ]  # fmt: skip
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    first = [p for p in own if p.default is inspect.Parameter.empty]
    ordered = [*first, *flags, *(p for p in own if p not in first)]

    def run(**values: Any) -> None:
        source = DataSource(**{name: values.pop(name) for name in names})
        verb(source, **values)

    run.__name__, run.__doc__ = verb.__name__, verb.__doc__
    run.__annotations__ = {p.name: p.annotation for p in ordered}
    run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    return run


def _flag(name: str, default: Any) -> Any:
    if name == "data":
        return typer.Argument(help=HELP[name], metavar="DATA", show_default=False)
    dashed = "--" + name.replace("_", "-")
    return typer.Option(default, dashed, help=HELP[name], rich_help_panel="Data", show_default=default is not None)
