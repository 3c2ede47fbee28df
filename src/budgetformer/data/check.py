"""Everything that can be said about data before training on it, in one streaming pass that keeps no text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from budgetformer.data.dataset import find_leaks, read_tables
from budgetformer.data.examples import FIRST_BAD, UNLABELLED, Example
from budgetformer.data.locate import DataSource, locate
from budgetformer.data.scan import Scan
from budgetformer.data.splits import repeats
from budgetformer.data.tokens import token_lengths

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_LENGTHS = (32, 64, 128, 256, 512, 1024)
ESTIMATED = "estimated from the bytes of the text; exact with --tokenizer"
LONG_WORD = 1000  # characters, from where on a word is worth a warning
BYTES_PER_TOKEN = 4.4  # of UTF-8, for BERT's vocabulary on English prose


def check_data(source: DataSource, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Read every split once and report, in JSON values: `errors` would stop training, `warnings` would not.

    Raises DataError only if nothing can be said at all.
    """
    lengths: dict[str, Counter[int]] = {}
    long_words: list[str] = []

    def watch(name: str, examples: Iterator[Example]) -> Iterator[Example]:
        lengths[name] = Counter()
        for example, length in token_lengths(examples, tokenizer) if tokenizer else map(_estimate, examples):
            lengths[name][length] += 1
            longest = max(map(len, f"{example.text} {example.text_pair or ''}".split()))
            if longest > LONG_WORD:
                long_words.append(f"{example.file}, line {example.line}: {longest} characters without white space")
            yield example

    tables = locate(source)
    data = read_tables(source, tables, watch=watch)
    leaks = find_leaks({name: scanned.hashes for name, scanned in data.scans.items()})
    splits = {
        name: {"file": tables[name].name, **_describe(scanned, data.labels, lengths[name])}
        for name, scanned in data.scans.items()
    }
    unreadable = [f"{words}: a tokenizer may read them as one unknown word" for words in long_words[:FIRST_BAD]]
    if len(long_words) > FIRST_BAD:
        unreadable.append(f"{len(long_words) - FIRST_BAD} more rows have such words")
    repeated = [
        f"{split['duplicates']} of {split['rows']} {name} rows repeat another row of {name}"
        for name, split in splits.items()
        if split["duplicates"]
    ]
    return {
        "data": source.data,
        "task": data.task,
        "labels": data.labels,
        "columns": data.columns_chosen,
        "lengths_by": "by the tokenizer" if tokenizer else ESTIMATED,
        "splits": splits,
        "leakage": [{"split": split, "other": other, "rows": rows} for split, other, rows, _ in leaks],
        "errors": data.errors,
        "warnings": [*(leak.sentence() for leak in leaks if leak.rows), *repeated, *unreadable, *data.warnings],
        "usable": not data.errors,
    }


def _describe(scanned: Scan, labels: list[str], lengths: Counter[int]) -> dict[str, Any]:
    """One split: `bad` counts rows by what is wrong with them; `cut` is the share longer than each maximum length."""
    longer = {most: sum(rows for length, rows in lengths.items() if length > most) for most in MAX_LENGTHS}
    return {
        "rows": scanned.rows,
        "classes": {label: scanned.counts.get(label, 0) for label in labels or sorted(scanned.counts)},
        "duplicates": repeats(scanned.hashes),
        "bad": {kind: rows for kind, rows in scanned.bad.counts.most_common() if kind != UNLABELLED},
        "first_bad": [{"line": row.line, "kind": row.kind, "reason": row.reason} for row in scanned.bad.first],
        "unlabelled": scanned.bad.unlabelled,
        "lengths": histogram(lengths),
        "cut": {str(most): rows / max(1, scanned.rows) for most, rows in longer.items()},
    }


def histogram(lengths: Mapping[int, int], bins: int = 12) -> list[dict[str, int]]:
    """Rows by length in equal bins up to the 99th percentile, and one more for the tail."""
    if not lengths:
        return []
    values = np.array(sorted(lengths))
    counts = np.array([lengths[value] for value in values])
    most = values[np.searchsorted(np.cumsum(counts), 0.99 * counts.sum())]
    width = max(1, math.ceil(most / bins))
    rows = np.bincount(np.minimum((values - 1) // width, bins), weights=counts, minlength=bins + 1).astype(int)
    first, last = np.flatnonzero(rows)[[0, -1]]
    return [
        {"from": int(i) * width + 1, "to": int(values[-1]) if i == bins else int(i + 1) * width, "rows": int(rows[i])}
        for i in range(first, last + 1)
    ]


def _estimate(example: Example) -> tuple[Example, int]:
    """An example and about how many tokens it has, special ones included."""
    pair = example.text_pair or ""
    return example, 2 + bool(pair) + math.ceil(len((example.text + pair).encode()) / BYTES_PER_TOKEN)
