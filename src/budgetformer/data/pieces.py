"""Texts -> token ids no longer than the model reads, and what happens to longer ones.

A text is one piece, or several where it is read in windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.data import Encoded, Example
from budgetformer.data.encoded import chunks, truncating
from budgetformer.errors import DataError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LONG = ("cut", "head-tail", "windows", "error")
_OVERLAP = 4  # a window shares one in this many of its tokens with the next

Piece = tuple[list[int], int]  # ids, and where the second text begins (0: there is none)


class TextError(DataError):
    """A text that cannot be scored; `row` is its place among the texts that were given, from 0."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"text {row}: {reason}")
        self.row, self.reason = row, reason


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of R texts in order; `counts` (R,) says how many a text has, `cut` (R,) whether some was left out."""

    encoded: Encoded
    counts: NDArray[np.int64]
    cut: NDArray[np.bool_]


class Cutter:
    """Tokenises as training did; `long` says what becomes of a text above `max_length` tokens.

    cut keeps the beginning, head-tail the first and last half of what fits, windows reads all of it in overlapping
    pieces, error refuses. Of a pair the longer text is cut first; head-tail then holds for each text by itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_length: int, long: str) -> None:
        if long not in LONG:
            raise UsageError(f"long is {long!r}: choose one of {', '.join(LONG)}")
        self.max_length, self.long = max_length, long
        self._rust = truncating(tokenizer, max_length, pair=False)
        self._whole = truncating(tokenizer, None, pair=False) if long == "head-tail" else None
        if long == "windows":
            room = max_length - self._rust.num_special_tokens_to_add(False)
            self._rust.enable_truncation(max_length, stride=room // _OVERLAP, strategy="longest_first")

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Pieces:
        """The texts (with a partner each, if given) as pieces; a text that cannot be scored raises TextError."""
        if pairs is not None and len(pairs) != len(texts):
            raise UsageError(f"{len(texts)} texts but {len(pairs)} second texts: give one for each")
        if pairs is not None and self.long == "windows":
            raise UsageError("long is 'windows', which is for single texts: for pairs choose cut, head-tail or error")
        for row, text in itertools.chain(enumerate(texts), enumerate(pairs or ())):
            if not isinstance(text, str):
                raise TextError(row, f"a {type(text).__name__}, not a string")
        partners: Sequence[str | None] = [None] * len(texts) if pairs is None else pairs
        flat, lengths, starts, counts, cut = [], list[int](), list[int](), list[int](), list[bool]()
        examples = (Example(t, p, None, row, "") for row, (t, p) in enumerate(zip(texts, partners, strict=True)))
        for chunk in chunks(examples):
            ids = list[list[int]]()
            for example, encoding in zip(chunk, self._tokenise(chunk), strict=True):
                found, was_cut = self._fit(example, encoding)
                ids += (piece for piece, _ in found)
                starts += (start for _, start in found)
                counts.append(len(found))
                cut.append(was_cut)
            lengths += map(len, ids)
            flat.append(np.fromiter(itertools.chain.from_iterable(ids), np.int32))
        encoded = Encoded(
            tokens=np.concatenate(flat) if flat else np.zeros(0, np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
            labels=np.zeros(len(lengths), np.float32),
            pair_start=np.array(starts, np.int32),
            lines=np.arange(len(lengths)),
            cut=sum(cut),
            has_pairs=pairs is not None,
        )
        return Pieces(encoded, np.array(counts, np.int64), np.array(cut, bool))

    def _tokenise(self, chunk: list[Example]) -> list[Any]:
        inputs = [e.text if e.text_pair is None else (e.text, e.text_pair) for e in chunk]
        try:
            encodings: list[Any] = self._rust.encode_batch_fast(inputs)
            return encodings
        except TypeError:  # the tokenizer does not say which
            for example in chunk:
                _check_unicode(example.text + (example.text_pair or ""), example.line)
            raise

    def _fit(self, example: Example, encoding: Any) -> tuple[list[Piece], bool]:
        """The pieces of one text, and whether they leave some of it out."""
        ids = encoding.ids
        start = encoding.sequence_ids.index(1) if example.text_pair is not None and 1 in encoding.sequence_ids else 0
        if len(ids) < self.max_length or not encoding.overflowing:
            if not ids:
                raise TextError(example.line, "the tokenizer finds no token in it: leave it out")
            return [(ids, start)], False
        if self.long == "error":
            remedy = "choose --long cut, head-tail or windows"
            raise TextError(example.line, f"has more than the model's {self.max_length} tokens: {remedy}")
        if self.long == "windows":
            return [(ids, 0), *((window.ids, 0) for window in encoding.overflowing)], False
        if self.long == "head-tail":
            ids = self._head_and_tail(example, ids, encoding.sequence_ids)
        return [(ids, start)], True

    def _head_and_tail(self, example: Example, ids: list[int], sequences: list[int | None]) -> list[int]:
        """The cut ids with the places of each text filled from both its ends; special tokens stay where they are."""
        ids = list(ids)
        assert self._whole is not None
        for number, text in enumerate((example.text, example.text_pair)):
            places = [place for place, sequence in enumerate(sequences) if sequence == number]
            if not places or text is None:
                continue
            whole = self._whole.encode(text, add_special_tokens=False).ids
            tail = len(places) // 2
            for place, token in zip(places, whole[: len(places) - tail] + whole[len(whole) - tail :], strict=True):
                ids[place] = token
        return ids


def _check_unicode(text: str, row: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(row, f"holds half a surrogate pair ({text[error.start]!a}): write it whole") from None
