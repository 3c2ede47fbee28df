"""Rows -> examples: text and label checked one by one, bad rows raised, set aside or counted."""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from budgetformer.data.columns import Columns
from budgetformer.data.sources import RAW_KEPT, BadRow, RawRow, Table
from budgetformer.errors import DataError, UsageError

Label = str | float | tuple[str, ...] | None
UNLABELLED = "unlabelled"  # a row whose label says that nobody knows it: dropped and counted, never an error


@dataclass(frozen=True)
class Example:
    """One text, or two, and its label: a name, a number, several names, or None for prediction.

    `fields` are all of the row's, for those who write it out again.
    """

    text: str
    text_pair: str | None
    label: Label
    line: int
    file: str
    fields: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class LabelRule:
    """How a label is read. `names` stand behind integer labels; `known`, if given, is all that may occur."""

    task: str
    separator: str | None = None
    names: tuple[str, ...] = ()
    known: frozenset[str] | None = None


class BadRows:
    """What happens to rows that cannot be used: "error" raises at the first, "skip" writes them to the
    quarantine file, "count" only counts. The first few are kept for show."""

    def __init__(self, policy: str, quarantine: Path | None = None, keep: int = 5) -> None:
        self.policy, self.quarantine, self.keep = policy, quarantine, keep
        self.counts: Counter[str] = Counter()
        self.first: list[BadRow] = []

    @property
    def bad(self) -> int:
        return sum(self.counts.values()) - self.unlabelled

    @property
    def unlabelled(self) -> int:
        return self.counts[UNLABELLED]

    def add(self, row: BadRow) -> None:
        self.counts[row.kind] += 1
        if row.kind == UNLABELLED:
            return
        if self.policy == "error":
            raise DataError(f"{row.file}, line {row.line}: {row.reason}; or set such rows aside with --bad-rows skip")
        if len(self.first) < self.keep:
            self.first.append(row)
        if self.policy == "skip" and self.quarantine:
            record = {"file": row.file, "line": row.line, "reason": row.reason, "raw": row.raw}
            try:
                with self.quarantine.open("w" if self.bad == 1 else "a", encoding="utf-8") as out:
                    out.write(json.dumps(record) + "\n")
            except OSError as error:
                raise UsageError(f"quarantine is {self.quarantine}, which cannot be written ({error})") from None


def read_examples(table: Table, columns: Columns, rule: LabelRule | None, bad: BadRows) -> Iterator[Example]:
    """Stream a table's examples; rows that cannot be used go to `bad`. Without a rule labels are not read."""
    for row in table.rows():
        if isinstance(row, BadRow):
            bad.add(row)
            continue
        try:
            text = _text(row.fields, columns.text)
            pair = _text(row.fields, columns.text_pair) if columns.text_pair else None
            label = _label(row.fields, columns.labels, rule) if rule else None
        except _UnusableError as error:
            raw = json.dumps(row.fields, ensure_ascii=False, default=str)[:RAW_KEPT]
            bad.add(BadRow(table.name, row.line, error.kind, error.reason, raw))
            continue
        yield Example(text, pair, label, row.line, table.name, row.fields)


def infer_task(rows: Iterable[RawRow], labels: tuple[str, ...], separator: str | None) -> str:
    """single, multi or regression, by the first rows: lists are multi, numbers with a fraction regression."""
    if len(labels) > 1 or separator:
        return "multi"
    values = [row.fields.get(labels[0]) for row in rows]
    if any(isinstance(value, list) for value in values):
        return "multi"
    numbers = [_number(value) for value in values if not _missing(value)]
    fraction = any(number is not None and not number.is_integer() for number in numbers)
    return "regression" if fraction and None not in numbers else "single"


class _UnusableError(Exception):
    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


def _text(fields: dict[str, Any], column: str) -> str:
    value = fields.get(column)
    if isinstance(value, str):
        if value and not value.isspace():
            if not value.isascii():
                _check_unicode(value, column)
            return value
    elif value is not None:
        kind = type(value).__name__
        raise _UnusableError("text is no string", f"{column!r} holds a {kind} ({value!r:.40}), not a string: quote it")
    raise _UnusableError("empty text", f"{column!r} is empty or missing: fill it in or drop the row")


def _check_unicode(value: str, column: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        bad = value[error.start]
        reason = f"{column!r} holds half a surrogate pair ({bad!a} at character {error.start + 1}): write it whole"
        raise _UnusableError("broken Unicode", reason) from None


def _missing(value: Any) -> bool:
    if isinstance(value, str):
        return not value or value.isspace() or value.casefold() == "nan"
    return value is None or (isinstance(value, float) and math.isnan(value))


def _label(fields: dict[str, Any], columns: tuple[str, ...], rule: LabelRule) -> Label:
    if len(columns) > 1:
        return tuple(column for column in columns if _flag(fields.get(column), column))
    column, value = columns[0], fields.get(columns[0])
    if rule.task == "multi":
        return _names(value, column, rule)
    if _missing(value):
        raise _UnusableError("no label", f"{column!r} is empty or NaN ({value!r}): fill in a label or drop the row")
    if rule.task == "regression":
        number = _number(value)
        if number is None or not math.isfinite(number):
            remedy = "mend it, or pass --task single for classes"
            reason = f"{column!r} holds {value!r:.40}, not a finite number: {remedy}"
            raise _UnusableError("label is no number", reason)
        return number
    if isinstance(value, list | dict):
        kind = type(value).__name__
        reason = f"{column!r} holds a {kind} ({value!r:.40}), not one label: pass --task multi for lists"
        raise _UnusableError("label is no single value", reason)
    return _name(value, column, rule)


def _names(value: Any, column: str, rule: LabelRule) -> tuple[str, ...]:
    if isinstance(value, str) and rule.separator:
        value = [part.strip() for part in value.split(rule.separator) if part.strip()]
    if not isinstance(value, list):
        reason = f"{column!r} holds {value!r:.40}, not a list of labels: write a list or pass --label-separator"
        raise _UnusableError("label is no list", reason)
    if any(_missing(part) for part in value):
        raise _UnusableError("no label", f"{column!r} holds an empty label in {value!r:.60}: remove it")
    return tuple(dict.fromkeys(_name(part, column, rule) for part in value))


def _name(value: Any, column: str, rule: LabelRule) -> str:
    name = label_text(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if rule.names and (is_number or name not in rule.names):
        if name == "-1":
            raise _UnusableError(UNLABELLED, f"{column!r} is -1: nobody labelled this row")
        if not (name.isdecimal() and int(name) < len(rule.names)):
            shown = ", ".join(rule.names[:8])
            reason = f"{column!r} is {name!r}, but the label names (labels.json) are {shown}: mend one of them"
            raise _UnusableError("unknown label", reason)
        name = rule.names[int(name)]
    if rule.known is not None and name not in rule.known:
        near = difflib.get_close_matches(name, rule.known, n=1)
        guess = f" (the nearest known one is {near[0]!r})" if near else ""
        reason = f"{column!r} is {name!r}, which no training row has{guess}: mend it or train on it too"
        raise _UnusableError("label unseen in training", reason)
    return name


def label_text(value: Any) -> str:
    """A label as the user would write it: 1, 1.0 and "1" are the class "1", true is "true"."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool | list | dict) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _flag(value: Any, column: str) -> bool:
    text = "" if value is None else label_text(value).casefold()
    if text in ("1", "true", "1.0"):
        return True
    if text in ("0", "false", "0.0"):
        return False
    raise _UnusableError("label is not 0 or 1", f"{column!r} holds {value!r:.40}, where 0 or 1 is needed: mend it")
