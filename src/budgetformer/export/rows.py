"""The rows on which an exported graph is checked: given, the run's own, or made up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetformer.data import DataSet, DataSource, Encoded, Example, open_data, stream_examples
from budgetformer.data.dataset import open_labelled
from budgetformer.data.encoded import LabelArray, truncating
from budgetformer.errors import BudgetFormerError, DataError
from budgetformer.models.model import BudgetFormerConfig
from budgetformer.training.prepare import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Say = Callable[[str], None]
_OWN_ROWS = 512
_MADE_UP_ROWS = 256


class Rows(NamedTuple):
    """Rows in token ids, where they come from in words, and whether their labels are known."""

    encoded: Encoded
    source: str
    labelled: bool


def find_rows(
    given: str | None, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], config: BudgetFormerConfig, say: Say
) -> Rows:
    """All rows of a file or data set that was given; else the first ones that the run kept back; else made-up ones."""
    if given is not None:
        return _given(given, tokenizer, record, say)
    trained = DataSource(**{**record["data"], "offline": True})
    try:
        if trained.data == "-":
            raise DataError("they came from standard input")
        data = open_data(trained)
        if data.fingerprint != record["data_fingerprint"]:
            raise DataError(f"{trained.data} has changed since")
        split = "test" if "test" in data.splits else "validation"
        return _labelled(data, split, tokenizer, record, _OWN_ROWS)
    except BudgetFormerError as error:
        say(f"the run's own rows cannot be had ({error}): checking on made-up ones, give real ones with --rows")
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, record["max_length"] + 1, _MADE_UP_ROWS)
    ids = [rng.integers(0, config.vocab_size, length) for length in lengths]
    starts = lengths // 2 if config.segment_embeddings else None
    labels = _unknown(len(ids), record)
    return Rows(
        _encoded(ids, starts, labels, range(1, len(ids) + 1)), f"{len(ids)} made-up rows of random tokens", False
    )


def _given(given: str, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], say: Say) -> Rows:
    names = ("text", "text_pair", "label", "label_separator", "data_dir")
    source = DataSource(given, **{name: record["data"][name] for name in names})
    task = {long: short for short, long in TASKS.items()}[record["task"]]
    try:
        data = open_labelled(source, task, record["labels"])
    except DataError as error:
        examples = list(stream_examples(replace(source, label=None)))
        say(f"{given} is read without labels: {error}")
        encoded = _encode(examples, tokenizer, record["max_length"], _unknown(len(examples), record))
        return Rows(encoded, f"{len(examples)} rows of {given}", False)
    return _labelled(data, next(iter(data.splits)), tokenizer, record, None)


def _labelled(
    data: DataSet, split: str, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], most: int | None
) -> Rows:
    examples = list(islice(data.splits[split].examples(), most))
    labels = LabelArray(data.task, data.labels)
    labels.extend(example.label for example in examples)
    encoded = _encode(examples, tokenizer, record["max_length"], labels.array())
    return Rows(encoded, f"{len(examples)} {split} rows of {data.source.data}", True)


def _unknown(rows: int, record: dict[str, Any]) -> NDArray[Any]:
    """Stand-ins for labels, of the kind that the task has."""
    if record["task"] == TASKS["multi"]:
        return np.zeros((rows, len(record["labels"])), np.uint8)
    return np.zeros(rows, np.int32 if record["task"] == TASKS["single"] else np.float32)


def _encode(examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, max_length: int, labels: Any) -> Encoded:
    pair = examples[0].text_pair is not None
    rust = truncating(tokenizer, max_length, pair=pair)
    found = rust.encode_batch_fast([(e.text, e.text_pair) if pair else e.text for e in examples])
    starts = [e.sequence_ids.index(1) if 1 in e.sequence_ids else 0 for e in found] if pair else None
    return _encoded([e.ids for e in found], starts, labels, (e.line for e in examples))


def _encoded(ids: Sequence[Any], starts: Any, labels: Any, lines: Iterable[int]) -> Encoded:
    return Encoded(
        tokens=np.concatenate([np.asarray(row, np.int32) for row in ids]),
        offsets=np.cumsum([0, *map(len, ids)], dtype=np.int64),
        labels=labels,
        pair_start=np.zeros(len(ids), np.int32) if starts is None else np.asarray(starts, np.int32),
        lines=np.fromiter(lines, np.int64),
        cut=0,
        has_pairs=starts is not None,
    )
