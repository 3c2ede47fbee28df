"""Rows -> examples: which columns hold text and label, each row checked, bad rows raised, set aside or counted."""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from budgetformer.data.sources import BadRow, RawRow
from budgetformer.errors import DataError, UsageError

TEXTS = (
    "text", "sentence", "content", "review", "document", "body", "comment", "message", "tweet", "utterance",
    "description", "query", "question", "title",
)  # fmt: skip
PAIRS = (
    ("text", "text_pair"), ("premise", "hypothesis"), ("sentence1", "sentence2"), ("sentence_1", "sentence_2"),
    ("sentence_a", "sentence_b"), ("text1", "text2"), ("text_a", "text_b"), ("question1", "question2"),
    ("question", "sentence"), ("question", "passage"), ("question", "context"), ("question", "answer"),
    ("query", "passage"), ("query", "document"),
)  # fmt: skip
LABELS = (
    "label", "labels", "gold_label", "class", "category", "target", "sentiment", "intent", "topic", "emotion",
    "stars", "rating", "score", "y",
)  # fmt: skip
Label = str | float | tuple[str, ...] | None
FIRST_BAD = 5  # bad rows that a report shows
FLAGS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
UNLABELLED = "unlabelled"  # a row whose label says that nobody knows it: dropped and counted, never an error


@dataclass(frozen=True)
class Schema:
    """How rows are read: columns, and the labels' task, None for prediction.

    labels: columns; several hold 0 or 1 each. inferred: whether a column was not asked for by name.
    separator: what separates several labels in one column. names: what stands behind integer labels.
    known: the only labels that may occur; None while they are being collected.
    """

    text: str
    text_pair: str | None = None
    labels: tuple[str, ...] = ()
    inferred: bool = False
    task: str | None = None
    separator: str | None = None
    names: tuple[str, ...] = ()
    known: frozenset[str] | None = None

    def sentence(self) -> str:
        """The choice of columns in words."""
        text = f"text from {self.text!r}" + (f" and {self.text_pair!r}" if self.text_pair else "")
        label = f", label from {', '.join(map(repr, self.labels))}" if self.labels else ""
        how = " (inferred; choose with --text, --text-pair, --label)" if self.inferred else ""
        return text + label + how

    def with_labels(self, labels: Iterable[str]) -> Schema:
        """The same for held-out rows: a class outside of `labels` makes a bad row."""
        return self if self.task == "regression" else replace(self, known=frozenset(labels))


def choose_columns(
    present: Sequence[str],
    file: str,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    need_label: bool = True,
) -> Schema:
    """Take what is asked for, infer the rest; raise DataError with the columns present if that fails.

    A second text is inferred only where the first one is too: ask for `text` alone to leave it out.
    """
    labels: tuple[str, ...] = ()
    if label is not None:
        separate = label.split(",") if label not in present else [label]
        labels = tuple(_check_present(present, file, name.strip(), "--label") for name in separate)
    elif need_label:
        labels = (_infer_label(present, file, (text, text_pair)),)
    for column, flag in ((text, "--text"), (text_pair, "--text-pair")):
        if column is not None and _check_present(present, file, column, flag) in labels:
            raise DataError(f"{file}: {column!r} is the label, it cannot be {flag} too: choose another column")
    if text is not None:
        return Schema(text, text_pair, labels, inferred=need_label and label is None)
    free = [column for column in present if column not in labels]
    folded = _folded(free)
    for first, second in PAIRS:
        if first in folded and second in folded and text_pair in (None, folded[second]):
            return Schema(folded[first], folded[second], labels, inferred=True)
    free = [column for column in free if column != text_pair]
    text = _by_name(free, TEXTS) or (free[0] if len(free) == 1 else None)
    if text is None:
        raise DataError(f"{file}: no column looks like text among {_list(present)}: name it with --text")
    return Schema(text, text_pair, labels, inferred=True)


def _check_present(present: Sequence[str], file: str, column: str, flag: str) -> str:
    if column in present:
        return column
    near = difflib.get_close_matches(column, present, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    raise DataError(f"{file}: no column {column!r} ({flag}); the columns are {_list(present)}{guess}")


def _infer_label(present: Sequence[str], file: str, taken: tuple[str | None, ...]) -> str:
    free = [column for column in present if column not in taken]
    if label := _by_name(free, LABELS):
        return label
    rest = [column for column in free if column.casefold() not in {*TEXTS, *itertools.chain(*PAIRS)}]
    if len(rest) == 1 and len(present) > 1:
        return rest[0]
    hint = "name it with --label; if the file has no header line, add one"
    raise DataError(f"{file}: no column looks like a label among {_list(present)}: {hint}")


def _by_name(columns: Sequence[str], names: Sequence[str]) -> str | None:
    folded = _folded(columns)
    return next((folded[name] for name in names if name in folded), None)


def _folded(columns: Sequence[str]) -> dict[str, str]:
    return {column.casefold(): column for column in reversed(columns)}


def _list(columns: Sequence[str]) -> str:
    shown = ", ".join(repr(column) for column in columns[:20])
    return shown + (f" and {len(columns) - 20} more" if len(columns) > 20 else "")


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


class BadRows:
    """What happens to rows that cannot be used: "error" raises at the first, "skip" writes them to the
    quarantine file, "count" only counts. The first few are kept for show."""

    def __init__(self, policy: str, quarantine: Path | None = None, *, append: bool = False) -> None:
        self.policy, self.quarantine, self._mode = policy, quarantine, "a" if append else "w"
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
        if len(self.first) < FIRST_BAD:
            self.first.append(row)
        if self.policy == "skip" and self.quarantine:
            record = {"file": row.file, "line": row.line, "reason": row.reason, "raw": row.raw}
            try:
                with self.quarantine.open(self._mode, encoding="utf-8") as out:
                    out.write(json.dumps(record) + "\n")
                self._mode = "a"
            except OSError as error:
                raise UsageError(f"quarantine is {self.quarantine}, which cannot be written ({error})") from None


def read_examples(rows: Iterable[RawRow | BadRow], schema: Schema, bad: BadRows) -> Iterator[Example]:
    """Rows -> examples; rows that cannot be used go to `bad`."""
    for row in rows:
        if isinstance(row, BadRow):
            bad.add(row)
            continue
        try:
            text = _text(row.fields, schema.text)
            pair = _text(row.fields, schema.text_pair) if schema.text_pair else None
            label = _label(row.fields, schema) if schema.task else None
        except BadRow as error:
            raw = json.dumps(row.fields, ensure_ascii=False, default=str)
            bad.add(BadRow(error.kind, error.reason, raw, row.file, row.line))
            continue
        yield Example(text, pair, label, row.line, row.file, row.fields)


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


def _text(fields: dict[str, Any], column: str) -> str:
    value = fields.get(column)
    if value is None or (isinstance(value, str) and (not value or value.isspace())):
        raise BadRow("empty text", f"{column!r} is empty or missing: fill it in or drop the row")
    if not isinstance(value, str):
        kind = type(value).__name__
        raise BadRow("text is no string", f"{column!r} holds a {kind} ({value!r:.40}), not a string: quote it")
    if not value.isascii() and (fault := broken_unicode(value)):
        raise BadRow("broken Unicode", f"{column!r} {fault}")
    return value


def broken_unicode(text: str) -> str:
    """What is wrong with a text that UTF-8 cannot hold; empty if nothing is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = f"{text[error.start]!a} at character {error.start + 1}"
        return f"holds half a surrogate pair ({shown}): write it whole"
    return ""


def _missing(value: Any) -> bool:
    if isinstance(value, str):
        return not value or value.isspace() or value.casefold() == "nan"
    return value is None or (isinstance(value, float) and math.isnan(value))


def _label(fields: dict[str, Any], schema: Schema) -> Label:
    columns = schema.labels
    if len(columns) > 1:
        return tuple(column for column in columns if _flag(fields.get(column), column))
    column, value = columns[0], fields.get(columns[0])
    if schema.task == "multi":
        return _names(value, column, schema)
    if _missing(value):
        raise BadRow("no label", f"{column!r} is empty or NaN ({value!r}): fill in a label or drop the row")
    if schema.task == "regression":
        number = _number(value)
        if number is None or not math.isfinite(number):
            remedy = "fix it, or pass --task single for classes"
            reason = f"{column!r} holds {value!r:.40}, not a finite number: {remedy}"
            raise BadRow("label is no number", reason)
        return number
    if isinstance(value, list | dict):
        kind = type(value).__name__
        reason = f"{column!r} holds a {kind} ({value!r:.40}), not one label: pass --task multi for lists"
        raise BadRow("label is no single value", reason)
    return _name(value, column, schema)


def _names(value: Any, column: str, schema: Schema) -> tuple[str, ...]:
    if isinstance(value, str) and schema.separator:
        value = [part.strip() for part in value.split(schema.separator) if part.strip()]
    if not isinstance(value, list):
        reason = f"{column!r} holds {value!r:.40}, not a list of labels: write a list or pass --label-separator"
        raise BadRow("label is no list", reason)
    if any(_missing(part) for part in value):
        raise BadRow("no label", f"{column!r} holds an empty label in {value!r:.60}: remove it")
    return tuple(dict.fromkeys(_name(part, column, schema) for part in value))


def _name(value: Any, column: str, schema: Schema) -> str:
    name = label_text(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if schema.names and (is_number or name not in schema.names):
        if name == "-1":
            raise BadRow(UNLABELLED, f"{column!r} is -1: nobody labelled this row")
        if not (name.isdecimal() and int(name) < len(schema.names)):
            shown = ", ".join(schema.names[:8])
            reason = f"{column!r} is {name!r}, but the label names (labels.json) are {shown}: fix one of them"
            raise BadRow("unknown label", reason)
        name = schema.names[int(name)]
    if schema.known is not None and name not in schema.known:
        near = difflib.get_close_matches(name, schema.known, n=1)
        guess = f" (the nearest known one is {near[0]!r})" if near else ""
        reason = f"{column!r} is {name!r}, which no training row has{guess}: fix it or train on it too"
        raise BadRow("label unseen in training", reason)
    return name


def label_text(value: Any) -> str:
    """A label as the user would write it: 1, 1.0 and "1" are the class "1", true is "true"."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool | list | dict) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _flag(value: Any, column: str) -> bool:
    flag = FLAGS.get(label_text(value).casefold())
    if flag is None:
        raise BadRow("label is not 0 or 1", f"{column!r} holds {value!r:.40}, where 0 or 1 is needed: fix it")
    return flag
