"""What a results file must hold, and an error that names the place where it does not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from budgetformer.errors import DataError

IDS = (
    "main", "fixed", "random", "model-scale", "data-scale", "dynamics", "complexity", "heatmaps", "attention-maps",
    "sizes", "ablation", "controls", "needs",
)  # fmt: skip
VERDICTS = ("holds", "does not hold", "not tested")

_Check = Callable[[Any, str], None]


def check(result: Any, source: str) -> None:
    """Raise a DataError that names `source` and the field unless `result` has the shape of one experiment's results."""
    try:
        _RESULT(result, "")
    except _FaultError as fault:
        at, wants, value = fault.args
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        field = f"field {at.removeprefix('.')}" if at else "the file"
        message = f"{source}: {field} must be {wants}, not {shown}: mend it, or delete the file and reproduce again"
        raise DataError(message) from None


class _FaultError(Exception):
    """Where, what was wanted, what was found."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _that(test: Callable[[Any], bool], wants: str) -> _Check:
    def run(value: Any, at: str) -> None:
        if not test(value):
            raise _FaultError(at, wants, value)

    return run


def _all(of: _Check) -> _Check:
    def run(value: Any, at: str) -> None:
        if not isinstance(value, list):
            raise _FaultError(at, "a list", value)
        for n, item in enumerate(value):
            of(item, f"{at}[{n}]")

    return run


def _object(needed: Mapping[str, _Check], optional: Mapping[str, _Check] | None = None) -> _Check:
    def run(value: Any, at: str) -> None:
        if not isinstance(value, Mapping):
            raise _FaultError(at, "an object", value)
        for key, of in needed.items():
            if key not in value:
                raise _FaultError(f"{at}.{key}", "there", None)
            of(value[key], f"{at}.{key}")
        for key, of in (optional or {}).items():
            if key in value:
                of(value[key], f"{at}.{key}")

    return run


def _matrix(value: Any, at: str, rows: int, columns: int) -> None:
    if len(value) != rows or any(len(row) != columns for row in value):
        found = f"{len(value)} rows of {sorted({len(row) for row in value})}"
        raise _FaultError(at, f"{rows} rows of {columns} numbers", found)


_text = _that(lambda v: isinstance(v, str), "text")
_name = _that(lambda v: isinstance(v, str) and bool(re.fullmatch(r"[A-Za-z0-9._-]+", v)), "letters, digits, '.-_'")
_number = _that(_is_number, "a finite number")
_unknown = _that(lambda v: v is None or _is_number(v), "a finite number or null")
_count = _that(lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0, "a whole number")
_known = _object(
    {"mean": _unknown},
    {"low": _unknown, "high": _unknown, "n": _count, "unit": _text,
     "published": _that(lambda v: v is None or isinstance(v, str) or _is_number(v), "a number, text or null")},
)  # fmt: skip


def _cell(value: Any, at: str) -> None:
    if isinstance(value, Mapping):
        _known(value, at)
    elif not (value is None or isinstance(value, str) or _is_number(value)):
        raise _FaultError(at, "text, a finite number, null or an object with a mean", value)


def _table(value: Any, at: str) -> None:
    column = _object({"key": _text, "title": _text}, {"digits": _count})
    _object({"title": _text, "note": _text, "columns": _all(column), "rows": _all(_object({}))})(value, at)
    for n, row in enumerate(value["rows"]):
        for column_ in value["columns"]:
            _cell(row.get(column_["key"]), f"{at}.rows[{n}].{column_['key']}")


def _series(value: Any, at: str) -> None:
    tick = _that(lambda v: isinstance(v, str) or _is_number(v), "a finite number or text")
    line = _all(_unknown)
    _object({"name": _text, "x": _all(tick), "y": line}, {"low": line, "high": line})(value, at)
    for key in ("y", "low", "high"):
        if key in value and len(value[key]) != len(value["x"]):
            raise _FaultError(f"{at}.{key}", f"{len(value['x'])} numbers, as many as x", len(value[key]))


def _group(value: Any, at: str) -> None:
    five = "five numbers (p5, q1, median, q3, p95) or null"
    quantiles = _that(lambda v: v is None or (isinstance(v, list) and len(v) == 5 and all(map(_is_number, v))), five)
    _object({"name": _text, "n": _count, "q": quantiles}, {"mean": _unknown})(value, at)


def _map(rows: str, columns: str) -> _Check:
    def run(value: Any, at: str) -> None:
        shape = {rows: _all(_text), columns: _all(_text), "values": _all(_all(_unknown))}
        _object({"title": _text, **shape})(value, at)
        _matrix(value["values"], f"{at}.values", len(value[rows]), len(value[columns]))

    return run


_groups = {"groups": _all(_group)}
_FIGURES: dict[str, _Check] = {
    "lines": _object(
        {"x_title": _text, "y_title": _text, "series": _all(_series)}, {"y2": _all(_series), "y2_title": _text}
    ),
    "boxes": _object({"y_title": _text}, {**_groups, "panels": _all(_object({"title": _text, **_groups}))}),
    "heatmap": _object({"panels": _all(_map("rows", "columns"))}),
    "attention": _object({"panels": _all(_map("query_tokens", "key_tokens"))}),
}


def _figure(value: Any, at: str) -> None:
    kind = _that(lambda v: v in _FIGURES, " or ".join(_FIGURES))
    _object({"name": _name, "title": _text, "kind": kind})(value, at)
    _FIGURES[value["kind"]](value, at)
    if value["kind"] == "boxes" and ("groups" in value) == ("panels" in value):
        raise _FaultError(f"{at}.groups", "given, or else panels, and not both", value.get("groups"))


def _figures(value: Any, at: str) -> None:
    _all(_figure)(value, at)
    names = [figure["name"] for figure in value]
    for n, name in enumerate(names):
        if name in names[:n]:
            raise _FaultError(f"{at}[{n}].name", "a name no other figure has", name)


_claim = _object({"claim": _text, "verdict": _that(lambda v: v in VERDICTS, " or ".join(VERDICTS)),
                  "evidence": _text, "explanation": _text})  # fmt: skip
_RESULT = _object(
    {"id": _that(lambda v: v in IDS, "one of " + ", ".join(IDS)), "title": _text, "scale": _text, "summary": _text,
     "provenance": _object({}, {"seeds": _all(_number), "data": _object({}), "cells": _count, "seconds": _unknown}),
     "tables": _all(_table), "figures": _figures, "claims": _all(_claim)},
)  # fmt: skip
