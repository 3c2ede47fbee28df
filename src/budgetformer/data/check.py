"""Everything that can be said about data before training on it, in one streaming pass and flat memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from budgetformer.data.examples import UNLABELLED, BadRows, Example
from budgetformer.data.locate import DataSource, locate
from budgetformer.data.scan import Scan, choose_reading, order_labels, scan
from budgetformer.data.sources import Table
from budgetformer.data.splits import overlap, repeats
from budgetformer.data.tokens import token_lengths
from budgetformer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_LENGTHS = (32, 64, 128, 256, 512, 1024)
BYTES_A_TOKEN = 4.4  # of UTF-8, for BERT's vocabulary on English prose


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
    tables = locate(source)
    reading = choose_reading(tables, source)
    splits: dict[str, SplitReport] = {}
    hashes: dict[str, Any] = {}
    errors: list[str] = []
    labels: list[str] = []
    for name in sorted(tables, key=["train", "validation", "test"].index):
        table = tables[name]
        bad, lengths = BadRows("count"), Counter[int]()
        examples = _tally(reading.examples(table, bad), tokenizer, lengths)
        result = scan(examples, reading, table.name)
        if name == "train":
            try:
                labels = order_labels(result.counts, reading, table.name)
                reading = reading.knowing(labels)
            except DataError as error:
                errors.append(str(error))
        hashes[name] = _sorted(result)
        splits[name] = _split_report(table.name, result, bad, lengths, labels, repeats(hashes[name]))
        errors += _errors(source, splits[name])
        if name == "train":
            errors += _carving_errors(source, tables, result, splits[name])
    leakage = [
        {"split": a, "other": b, "rows": int(overlap(hashes[a], hashes[b]).sum())}
        for a, b in (("validation", "train"), ("test", "train"), ("test", "validation"))
        if a in splits and b in splits
    ]
    by = "estimated from the bytes of the text; exact with --tokenizer" if tokenizer is None else "by the tokenizer"
    return CheckReport(
        data=source.data,
        task=reading.rule.task,
        labels=labels,
        columns=reading.columns.sentence(),
        lengths_by=by,
        splits=splits,
        leakage=leakage,
        errors=errors,
        warnings=_warnings(splits, leakage),
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
        lengths[2 + bool(pair) + math.ceil(size / BYTES_A_TOKEN)] += 1
        yield example


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _sorted(result: Scan) -> Any:
    hashes = result.hashes
    hashes.sort()  # in place: nothing else reads them, and a copy would double the memory
    return hashes


def _split_report(
    file: str, result: Scan, bad: BadRows, lengths: Counter[int], labels: list[str], duplicates: int
) -> SplitReport:
    classes = {label: result.counts.get(label, 0) for label in labels or sorted(result.counts)}
    kinds = {kind: count for kind, count in bad.counts.most_common() if kind != UNLABELLED}
    first = [{"line": row.line, "kind": row.kind, "reason": row.reason} for row in bad.first]
    return SplitReport(file, result.rows, classes, duplicates, kinds, first, bad.unlabelled, dict(lengths))


def _errors(source: DataSource, split: SplitReport) -> list[str]:
    errors = []
    if not split.rows and not split.unlabelled:
        errors.append(f"{split.file}: no usable rows")
    if split.bad and source.bad_rows == "error":
        errors.append(f"{split.file}: {sum(split.bad.values())} bad rows: mend them or pass --bad-rows skip")
    return errors


def _carving_errors(source: DataSource, tables: Mapping[str, Table], train: Scan, report: SplitReport) -> list[str]:
    if "validation" in tables or source.validation == "test":
        return []
    needed = 1 if "test" in tables or not source.test_fraction else 2
    spare = report.rows - report.duplicates - len(np.unique(train.strata))
    few = f"{report.file}: {report.rows} rows are too few to carve out {needed} set(s): add rows or pass --validation"
    return [few] if spare < needed else []


def _warnings(splits: Mapping[str, SplitReport], leakage: list[dict[str, Any]]) -> list[str]:
    warnings = [
        f"{leak['rows']} of {splits[leak['split']].rows} {leak['split']} rows also occur in {leak['other']}"
        for leak in leakage
        if leak["rows"]
    ]
    for name, split in splits.items():
        if split.duplicates:
            warnings.append(f"{split.duplicates} of {split.rows} {name} rows repeat another row of {name}")
        if split.unlabelled:
            warnings.append(f"{split.unlabelled} {name} rows without a label (-1) will be dropped")
    missing = [label for label, rows in splits["train"].classes.items() if not rows]
    if missing:
        warnings.append(f"no training row has the label {', '.join(map(repr, missing[:5]))}")
    return warnings
