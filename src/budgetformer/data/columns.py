"""Which columns hold the text, its partner and the label: asked for, or inferred from their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from budgetformer.errors import DataError

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


@dataclass(frozen=True)
class Columns:
    """The chosen columns; several label columns hold 0 or 1 each, none means reading for prediction."""

    text: str
    text_pair: str | None
    labels: tuple[str, ...]
    inferred: bool

    def sentence(self) -> str:
        """The choice in words."""
        text = f"text from {self.text!r}" + (f" and {self.text_pair!r}" if self.text_pair else "")
        label = f", label from {', '.join(map(repr, self.labels))}" if self.labels else ""
        how = " (inferred; choose with --text, --text-pair, --label)" if self.inferred else ""
        return text + label + how


def choose_columns(
    present: Sequence[str],
    file: str,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    need_label: bool = True,
) -> Columns:
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
        return Columns(text, text_pair, labels, inferred=need_label and label is None)
    free = [column for column in present if column not in labels]
    pairs = [(a, b) for a, b in _known_pairs(free) if text_pair in (None, b)]
    if pairs:
        text, text_pair = pairs[0]
    free = [column for column in free if column != text_pair]
    text = text or _by_name(free, TEXTS) or (free[0] if len(free) == 1 else None)
    if text is None:
        raise DataError(f"{file}: no column looks like text among {_list(present)}: name it with --text")
    return Columns(text, text_pair, labels, inferred=True)


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
    rest = [column for column in free if column.casefold() not in {*TEXTS, *(name for p in PAIRS for name in p)}]
    if len(rest) == 1 and len(present) > 1:
        return rest[0]
    hint = "name it with --label; if the file has no header line, add one"
    raise DataError(f"{file}: no column looks like a label among {_list(present)}: {hint}")


def _by_name(columns: Sequence[str], names: Sequence[str]) -> str | None:
    folded = {column.casefold(): column for column in reversed(columns)}
    return next((folded[name] for name in names if name in folded), None)


def _known_pairs(columns: Sequence[str]) -> list[tuple[str, str]]:
    folded = {column.casefold(): column for column in reversed(columns)}
    return [(folded[a], folded[b]) for a, b in PAIRS if a in folded and b in folded]


def _list(columns: Sequence[str]) -> str:
    shown = ", ".join(repr(column) for column in columns[:20])
    return shown + (f" and {len(columns) - 20} more" if len(columns) > 20 else "")
