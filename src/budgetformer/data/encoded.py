"""Examples -> token ids: one flat array, about four bytes a token, no copy of the text."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.dataset import DataSet, Split
from budgetformer.data.examples import Example
from budgetformer.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK_ROWS, CHUNK_CHARS = 1000, 2**22


@dataclass(frozen=True, eq=False)
class Encoded:
    """A split in token ids. Row i is `tokens[offsets[i]:offsets[i + 1]]`, the i-th of `Split.examples()`.

    labels: class numbers (int32), numbers (float32), or a row of 0 and 1 for each label (uint8).
    pair_start: where in the row the second text begins; 0 if there is none.
    lines: the row's line in its file. cut: how many rows were longer than the maximum length.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    labels: NDArray[Any]
    pair_start: NDArray[np.int32]
    lines: NDArray[np.int64]
    cut: int
    has_pairs: bool

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def first(self, rows: int) -> Encoded:
        """The first rows alone."""
        kept = self.offsets[: rows + 1]
        return replace(
            self, tokens=self.tokens[: kept[-1]], offsets=kept, labels=self.labels[:rows],
            pair_start=self.pair_start[:rows], lines=self.lines[:rows],
        )  # fmt: skip

    def lengths_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of tokens of each of these rows."""
        return self.offsets[rows + 1] - self.offsets[rows]

    @property
    def nbytes(self) -> int:
        parts = (self.tokens, self.offsets, self.labels, self.pair_start, self.lines)
        return sum(part.nbytes for part in parts)


def encode(split: Split, data: DataSet, tokenizer: PreTrainedTokenizerFast, max_length: int) -> Encoded:
    """Tokenise a split, streaming. Long rows are cut (the longer text of a pair first); special tokens stay."""
    rust = truncating(tokenizer, max_length, pair=data.is_pair)
    tokens, offsets, pair_start, lines = array("i"), array("q", [0]), array("i"), array("q")
    labels = LabelArray(data.task, data.labels)
    cut = 0
    for chunk in chunks(split.examples()):
        encodings = rust.encode_batch_fast(_inputs(chunk))
        ids = [encoding.ids for encoding in encodings]
        flat = np.fromiter(itertools.chain.from_iterable(ids), np.int32, sum(map(len, ids)))
        tokens.frombytes(flat.tobytes())
        ends = np.cumsum([len(row) for row in ids], dtype=np.int64) + offsets[-1]
        offsets.frombytes(ends.tobytes())
        cut += sum(len(row) == max_length and bool(e.overflowing) for row, e in zip(ids, encodings, strict=True))
        starts = (_pair_start(e) for e in encodings) if data.is_pair else itertools.repeat(0, len(ids))
        pair_start.extend(starts)
        lines.extend(example.line for example in chunk)
        labels.extend(example.label for example in chunk)
    return Encoded(
        tokens=np.frombuffer(tokens, np.int32),
        offsets=np.frombuffer(offsets, np.int64),
        labels=labels.array(),
        pair_start=np.frombuffer(pair_start, np.int32),
        lines=np.frombuffer(lines, np.int64),
        cut=cut,
        has_pairs=data.is_pair,
    )


def token_lengths(examples: Iterable[Example], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[Example, int]]:
    """Each example with its number of tokens, special ones included, before any cutting."""
    rust = truncating(tokenizer, None, pair=False)
    for chunk in chunks(examples):
        for example, encoding in zip(chunk, rust.encode_batch_fast(_inputs(chunk)), strict=True):
            yield example, len(encoding)


def truncating(tokenizer: PreTrainedTokenizerFast, max_length: int | None, *, pair: bool) -> Any:
    """A copy of the tokenizer's Rust half that cuts at `max_length` and does not pad."""
    from tokenizers import Tokenizer

    rust = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    rust.no_padding()
    rust.no_truncation()
    if max_length is not None:
        least = rust.num_special_tokens_to_add(pair) + 1 + pair
        if max_length < least:
            raise UsageError(f"max_length is {max_length}: it must be at least {least} to hold the special tokens")
        rust.enable_truncation(max_length, strategy="longest_first")
    return rust


def chunks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Batches for the tokenizer, bounded in rows and in characters."""
    chunk: list[Example] = []
    chars = 0
    for example in examples:
        chunk.append(example)
        chars += len(example.text) + len(example.text_pair or "")
        if len(chunk) >= CHUNK_ROWS or chars >= CHUNK_CHARS:
            yield chunk
            chunk, chars = [], 0
    if chunk:
        yield chunk


class LabelArray:
    """Labels as they come -> the array that training reads."""

    def __init__(self, task: str, labels: list[str]) -> None:
        self._task, self._width = task, len(labels)
        self._number = {label: number for number, label in enumerate(labels)}
        self._values = array({"single": "i", "regression": "f", "multi": "B"}[task])

    def extend(self, labels: Iterable[Any]) -> None:
        if self._task == "regression":
            self._values.extend(labels)
        elif self._task == "single":
            self._values.extend(self._number[label] for label in labels)
        else:
            for names in labels:
                row = bytearray(self._width)
                for name in names:
                    row[self._number[name]] = 1
                self._values.frombytes(row)

    def array(self) -> NDArray[Any]:
        if self._task == "multi":
            return np.frombuffer(self._values, np.uint8).reshape(-1, self._width)
        return np.frombuffer(self._values, np.int32 if self._task == "single" else np.float32)


def _inputs(chunk: list[Example]) -> list[str | tuple[str, str]]:
    return [e.text if e.text_pair is None else (e.text, e.text_pair) for e in chunk]


def _pair_start(encoding: Any) -> int:
    sequences = encoding.sequence_ids
    return sequences.index(1) if 1 in sequences else 0
