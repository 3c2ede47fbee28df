"""The flags that say what data to read: the same words in every verb, and in each verb those that act there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import typer

from budgetformer.data.locate import DataSource

BUDGET = (
    "A share of the dense model's cost such as 0.3, learned, full, an operating point's name (see calibrate), or, for "
    "heads, fixed:X, max:X, mean:X."
)
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
    "bad_rows": "error: stop at the first bad row; skip: set bad rows aside in NAME.bad.jsonl here; FILE.jsonl: set "
    "them aside there.",
    "validation_fraction": "The share of the training rows to validate on, where no validation set is given.",
    "test_fraction": "The share of the rows to test on, where neither validation nor test set is given.",
    "seed": "The seed of everything random.",
    "offline": "Never use the network.",
    "unlabelled": "With --base: more texts, which the fine-tuned encoder labels.",
    "limit": "Use at most this many rows: of the training rows, or of the rows to evaluate on.",
}


COLUMNS = ("text", "text_pair", "label", "encoding", "bad_rows", "limit")  # for labelled data of a trained model
TABLES = ("validation", "test", "text", "text_pair", "label", "task", "label_separator", "encoding", "bad_rows",
          "offline")  # fmt: skip


def takes_data(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb whose first parameter is a DataSource the flags that make one: those of these fields.

    The verb's own arguments (parameters without a default) come before DATA, its own options after the data flags.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(verb, include_extras=True)
        parameters = [
            p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for p in list(inspect.signature(verb).parameters.values())[1:]
        ]
        types = get_type_hints(DataSource)
        flags = [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=types[field.name],
                              default=_flag(field.name, field.default))
            for field in fields(DataSource) if field.name in ("data", *names)
        ]  # fmt: skip
        arguments = [p for p in parameters if p.default is inspect.Parameter.empty]
        ordered = [*arguments, *flags, *(p for p in parameters if p not in arguments)]

        def run(**values: Any) -> None:
            source = {name: values.pop(name) for name in ("data", *names)}
            verb(DataSource(**{**source, **quarantine_fields(source["bad_rows"])}), **values)

        run.__name__, run.__doc__ = verb.__name__, verb.__doc__
        run.__annotations__ = {p.name: p.annotation for p in ordered}
        run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        return run

    return decorate


def quarantine_fields(bad_rows: str) -> dict[str, Any]:
    """What --bad-rows means for a DataSource: error, skip, or skip into a file."""
    return {"bad_rows": "skip", "quarantine": bad_rows} if bad_rows.endswith(".jsonl") else {"bad_rows": bad_rows}


def _flag(name: str, default: Any) -> Any:
    if name == "data":
        return typer.Argument(help=HELP[name], metavar="DATA", show_default=False)
    dashed = "--" + name.replace("_", "-")
    return typer.Option(default, dashed, help=HELP[name], rich_help_panel="Data", show_default=default is not None)
