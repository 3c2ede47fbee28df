"""Everything that can be said about data before training on it, in one streaming pass that keeps no text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from budgetformer.data.dataset import find_leaks
from budgetformer.data.encoded import token_lengths
from budgetformer.data.examples import UNLABELLED, Example
from budgetformer.data.locate import DataSource, locate
from budgetformer.data.scan import Scan, survey
from budgetformer.data.splits import repeats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_LENGTHS = (32, 64, 128, 256, 512, 1024)
BYTES_PER_TOKEN = 4.4  # of UTF-8, for BERT's vocabulary on English prose


@dataclass(frozen=True)
class SplitReport:
    """One split. `lengths` counts rows by number of tokens, `bad` rows by what is wrong with them."""

    file: str
    rows: int
    classes: dict[str, int]
    duplicates: int
    bad: dict[str, int]
    first_bad: list[dict[str, Any]]
    unlabelled: int
    lengths: dict[int, int]

    @property
    def cut(self) -> dict[int, float]:
        """The share of rows longer than each maximum length."""
        return {most: self._share(most) for most in MAX_LENGTHS}

    def _share(self, most: int) -> float:
        return sum(count for length, count in self.lengths.items() if length > most) / max(1, self.rows)


@dataclass(frozen=True)
class CheckReport:
    """The findings. `errors` would stop training; `warnings` would not."""

    data: str
    task: str
    labels: list[str]
    columns: str
    lengths_by: str
    splits: dict[str, SplitReport]
    leakage: list[dict[str, Any]]
    errors: list[str]
    warnings: list[str]

    @property
    def usable(self) -> bool:
        return not self.errors

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        report = asdict(self) | {"usable": self.usable}
        for name, split in self.splits.items():
            report["splits"][name] |= {
                "lengths": histogram(split.lengths),
                "cut": {str(most): share for most, share in split.cut.items()},
            }
        return report


def check_data(source: DataSource, tokenizer: PreTrainedTokenizerFast | None = None) -> CheckReport:
    """Read every split once and report. Raises DataError only if nothing can be said at all."""
    lengths: dict[str, Counter[int]] = {}

    def watch(name: str, examples: Iterator[Example]) -> Iterator[Example]:
        lengths[name] = Counter()
        return _tally(examples, tokenizer, lengths[name])

    tables = locate(source)
    result = survey(source, tables, watch=watch)
    leaks = find_leaks({name: scanned.hashes for name, scanned in result.scans.items()})
    splits = {
        name: _split_report(tables[name].name, scanned, result.labels, dict(lengths[name]))
        for name, scanned in result.scans.items()
    }
    repeated = [
        f"{split.duplicates} of {split.rows} {name} rows repeat another row of {name}"
        for name, split in splits.items()
        if split.duplicates
    ]
    return CheckReport(
        data=source.data,
        task=str(result.schema.task),
        labels=result.labels,
        columns=result.schema.columns.sentence(),
        lengths_by="by the tokenizer" if tokenizer else "estimated from the bytes of the text; exact with --tokenizer",
        splits=splits,
        leakage=[{"split": leak.split, "other": leak.other, "rows": leak.rows} for leak in leaks],
        errors=result.errors,
        warnings=[*(leak.sentence() for leak in leaks if leak.rows), *repeated, *result.warnings],
    )


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
        {"from": int(i) * width + 1, "to": int(values[-1]) if i == bins else (i + 1) * width, "rows": int(rows[i])}
        for i in range(first, last + 1)
    ]


def _tally(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerFast | None, lengths: Counter[int]
) -> Iterator[Example]:
    if tokenizer is not None:
        for example, length in token_lengths(examples, tokenizer):
            lengths[length] += 1
            yield example
        return
    for example in examples:
        pair = example.text_pair
        size = _bytes(example.text) + (_bytes(pair) if pair else 0)
        lengths[2 + bool(pair) + math.ceil(size / BYTES_PER_TOKEN)] += 1
        yield example


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _split_report(file: str, scanned: Scan, labels: list[str], lengths: dict[int, int]) -> SplitReport:
    bad = scanned.bad
    return SplitReport(
        file=file,
        rows=scanned.rows,
        classes={label: scanned.counts.get(label, 0) for label in labels or sorted(scanned.counts)},
        duplicates=repeats(scanned.hashes),
        bad={kind: count for kind, count in bad.counts.most_common() if kind != UNLABELLED},
        first_bad=[{"line": row.line, "kind": row.kind, "reason": row.reason} for row in bad.first],
        unlabelled=bad.unlabelled,
        lengths=lengths,
    )
