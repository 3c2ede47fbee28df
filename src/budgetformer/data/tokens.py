"""Texts -> token ids in one flat table, about four bytes per token: the only way from text to what a model reads.

A text is one piece, or several where it is read in windows. Shapes: T texts, P pieces.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.examples import Example, broken_unicode
from budgetformer.errors import DataError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from budgetformer.data.dataset import DataSet, Split

LONG = ("cut", "head-tail", "windows", "error")
CHUNK_ROWS, CHUNK_CHARS = 1000, 2**22
_OVERLAP = 4  # a window shares one in this many of its tokens with the next

Piece = tuple[list[int], int]  # ids, and where the second text begins (0: there is none)


class TextError(DataError):
    """A text that cannot be scored; `row` is its place among the texts, from 0."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"text {row}: {reason}")
        self.row, self.reason = row, reason


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Texts in token ids. Piece i is `tokens[offsets[i]:offsets[i + 1]]`.

    labels: class numbers (int32), numbers (float32), or a row of 0 and 1 for each label (uint8); None: not known.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]  # (P + 1,)
    pair_start: NDArray[np.int32]  # (P,) where in the piece the second text begins; 0 if there is none
    has_pairs: bool
    lines: NDArray[np.int64]  # (T,) the text's line in its file
    truncated: NDArray[np.bool_]  # (T,) whether some of the text was left out
    labels: NDArray[Any] | None = None  # (T,) or (T, C)
    pieces: NDArray[np.int64] | None = None  # (T,) how many pieces a text has; None: one each
    words_logits: NDArray[np.float32] | None = None  # (P, C) what a model's stage of words says, where it is known
    # What was left out of each piece, for the stage of words, which reads all of a single text; None: nothing.
    rest: NDArray[np.int32] | None = None
    rest_offsets: NDArray[np.int64] | None = None  # (P + 1,)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each piece. (P,)."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))

    def select(self, rows: NDArray[np.int64]) -> TokenTable:
        """These texts alone, in this order; each must be one piece."""
        assert self.pieces is None
        tokens, offsets = _gather(self.tokens, self.offsets, rows)
        labels = None if self.labels is None else self.labels[rows]
        words = None if self.words_logits is None else self.words_logits[rows]
        rest: Any = (None, None)
        if self.rest is not None and self.rest_offsets is not None:
            rest = _gather(self.rest, self.rest_offsets, rows)
        return TokenTable(
            tokens, offsets, self.pair_start[rows], self.has_pairs, self.lines[rows], self.truncated[rows], labels,
            words_logits=words, rest=rest[0], rest_offsets=rest[1],
        )  # fmt: skip

    def untruncated(self) -> TokenTable:
        """The same pieces, each followed by what was left out of it."""
        if self.rest is None or self.rest_offsets is None:
            return self
        both = np.concatenate([self.offsets[:-1], len(self.tokens) + self.rest_offsets[:-1]])
        ends = np.concatenate([self.offsets[1:], len(self.tokens) + self.rest_offsets[1:]])
        order = np.arange(2 * len(self)).reshape(2, -1).T.ravel()  # a piece, its rest, the next piece, ...
        tokens, offsets = _spans(np.concatenate([self.tokens, self.rest]), both[order], ends[order])
        return replace(self, tokens=tokens, offsets=offsets[::2], rest=None, rest_offsets=None)

    def rows(self) -> list[TokenTable]:
        """Each text as a table of its own; each must be one piece."""
        return [self] if len(self) == 1 else [self.select(np.array([row])) for row in range(len(self))]

    @staticmethod
    def join(tables: Sequence[TokenTable]) -> TokenTable:
        """The texts of several tables without labels, one after the other."""
        arrays = ("tokens", "pair_start", "lines", "truncated", "lengths")
        joined = {name: np.concatenate([getattr(table, name) for table in tables]) for name in arrays}
        offsets = np.concatenate([[0], np.cumsum(joined.pop("lengths"))])
        if any(table.rest is not None for table in tables):
            none = np.zeros(0, np.int32)
            joined["rest"] = np.concatenate([none if table.rest is None else table.rest for table in tables])
            lengths = [np.zeros(len(t)) if t.rest_offsets is None else np.diff(t.rest_offsets) for t in tables]
            joined["rest_offsets"] = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
        words = [table.words_logits for table in tables if table.words_logits is not None]
        return TokenTable(
            **joined, offsets=offsets, has_pairs=any(table.has_pairs for table in tables),
            words_logits=np.concatenate(words) if len(words) == len(tables) else None,
        )  # fmt: skip

    @staticmethod
    def random(vocab_size: int, max_length: int, pairs: bool, rows: int = 256) -> TokenTable:
        """Texts of random tokens, the same each time: to try a model with, for want of real ones."""
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, max_length + 1, rows)
        return TokenTable(
            tokens=np.concatenate([rng.integers(0, vocab_size, length) for length in lengths]).astype(np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            pair_start=(lengths // 2 if pairs else np.zeros_like(lengths)).astype(np.int32),
            has_pairs=pairs, lines=np.arange(1, rows + 1), truncated=np.zeros(rows, bool),
        )  # fmt: skip


def _gather(
    tokens: NDArray[np.int32], offsets: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The tokens of these rows, and their offsets."""
    return _spans(tokens, offsets[:-1][rows], offsets[1:][rows])


def _spans(
    tokens: NDArray[np.int32], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The tokens from each start to its end, one span after the other, and their offsets."""
    lengths = ends - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return tokens[np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])], offsets


class TextEncoder:
    """Tokenises as training did; `long` says what becomes of a text above `max_length` tokens.

    cut keeps the beginning, head-tail the first and last half of what fits, windows reads all of it in overlapping
    pieces, error refuses. Of a pair the longer text is cut first; head-tail then holds for each text by itself.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, long: str = "cut", *, pair: bool = False) -> None:
        if long not in LONG:
            raise UsageError(f"long is {long!r}: choose one of {', '.join(LONG)}")
        self.max_length, self.long = max_length, long
        self._rust = truncating_tokenizer(tokenizer, max_length, pair=pair)
        self._unlimited = truncating_tokenizer(tokenizer, None) if long == "head-tail" else None
        if long == "windows":
            room = max_length - self._rust.num_special_tokens_to_add(False)
            self._rust.enable_truncation(max_length, stride=room // _OVERLAP, strategy="longest_first")

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> TokenTable:
        """The texts (each with its second text, for pairs); a text that cannot be scored raises TextError."""
        if pairs is not None and len(pairs) != len(texts):
            raise UsageError(f"{len(texts)} texts but {len(pairs)} second texts: give one for each")
        if pairs is not None and self.long == "windows":
            raise UsageError("long is 'windows', which is for single texts: for pairs choose cut, head-tail or error")
        for row, text in itertools.chain(enumerate(texts), enumerate(pairs or ())):
            if not isinstance(text, str):
                raise TextError(row, f"a {type(text).__name__}, not a string")
        seconds: Sequence[str | None] = [None] * len(texts) if pairs is None else pairs
        both = zip(texts, seconds, strict=True)
        return self.table((Example(t, p, None, row, "") for row, (t, p) in enumerate(both)), pairs is not None)

    def table(self, examples: Iterable[Example], pairs: bool, data: DataSet | None = None) -> TokenTable:
        """A stream of examples as a table, with their labels if they are those of `data`."""
        tokens, lengths, starts, lines = array("i"), array("q"), array("i"), array("q")
        counts, truncated, labels = array("q"), bytearray(), list[NDArray[Any]]()
        rest, rests = array("i"), array("q", [0])
        for chunk in chunks(examples):
            for example, encoding in zip(chunk, self._tokenize(chunk, len(counts)), strict=True):
                pieces, left_out = self._fit(example, encoding, len(counts))
                for ids, start in pieces:
                    tokens.extend(ids)
                    lengths.append(len(ids))
                    starts.append(start)
                counts.append(len(pieces))
                truncated.append(left_out is not None)
                rest.extend(left_out or ())
                rests.extend([len(rest)] * len(pieces))
            lines.extend(example.line for example in chunk)
            if data is not None:
                labels.append(_label_array([example.label for example in chunk], data.task, data.labels))
        return TokenTable(
            tokens=np.frombuffer(tokens, np.int32),
            offsets=np.concatenate([[0], np.cumsum(np.frombuffer(lengths, np.int64))]),
            pair_start=np.frombuffer(starts, np.int32),
            has_pairs=pairs,
            lines=np.frombuffer(lines, np.int64),
            truncated=np.frombuffer(bytes(truncated), np.bool_),
            labels=None if data is None else np.concatenate(labels or [_label_array([], data.task, data.labels)]),
            pieces=np.frombuffer(counts, np.int64) if self.long == "windows" else None,
            rest=np.frombuffer(rest, np.int32) if rest else None,
            rest_offsets=np.frombuffer(rests, np.int64) if rest else None,
        )

    def _tokenize(self, chunk: list[Example], first: int) -> list[Any]:
        try:
            encodings: list[Any] = self._rust.encode_batch_fast(_inputs(chunk))
            return encodings
        except TypeError:  # the tokenizer does not say which
            for row, example in enumerate(chunk, first):
                if fault := broken_unicode(example.text + (example.text_pair or "")):
                    raise TextError(row, fault) from None
            raise

    def _fit(self, example: Example, encoding: Any, row: int) -> tuple[list[Piece], list[int] | None]:
        """The pieces of one text, and what they leave out of it (unknown for a pair); None: nothing."""
        ids = encoding.ids
        start = encoding.sequence_ids.index(1) if example.text_pair is not None and 1 in encoding.sequence_ids else 0
        if len(ids) < self.max_length or not encoding.overflowing:
            if not ids:
                raise TextError(row, "the tokenizer finds no token in it: leave it out")
            return [(ids, start)], None
        if self.long == "error":
            remedy = "choose --long cut, head-tail or windows"
            raise TextError(row, f"has more than the model's {self.max_length} tokens: {remedy}")
        if self.long == "windows":
            return [(ids, 0), *((window.ids, 0) for window in encoding.overflowing)], None
        if self.long == "head-tail":
            ids, left_out = self._head_and_tail(example, ids, encoding.sequence_ids)
        else:
            left_out = overflow(encoding)
        return [(ids, start)], [] if example.text_pair is not None else left_out

    def _head_and_tail(
        self, example: Example, ids: list[int], sequences: list[int | None]
    ) -> tuple[list[int], list[int]]:
        """The cut ids with the places of each text filled from both its ends, special tokens as they were; the rest."""
        ids, left_out = list(ids), list[int]()
        assert self._unlimited is not None
        for number, text in enumerate((example.text, example.text_pair)):
            places = [place for place, sequence in enumerate(sequences) if sequence == number]
            if not places or text is None:
                continue
            full = self._unlimited.encode(text, add_special_tokens=False).ids
            head, tail = len(places) - len(places) // 2, len(full) - len(places) // 2
            for place, token in zip(places, full[:head] + full[tail:], strict=True):
                ids[place] = token
            left_out += full[head:tail]
        return ids, left_out


def overflow(encoding: Any) -> list[int]:
    """The tokens that a tokenizer has cut from a single text, without special ones."""
    return [
        token
        for part in encoding.overflowing
        for token, special in zip(part.ids, part.special_tokens_mask, strict=True)
        if not special
    ]


def encode_split(split: Split, data: DataSet, tokenizer: Tokenizer, max_length: int) -> TokenTable:
    """A split with its labels, row by row as `split.examples()`; long rows are cut."""
    return encode_stream(split.examples, data, tokenizer, max_length, labelled=True)


def encode_stream(
    stream: Callable[[], Iterator[Example]], data: DataSet, tokenizer: Tokenizer, max_length: int, *, labelled: bool
) -> TokenTable:
    """Examples like those of `data`, as often as they are asked for; long ones are cut."""
    encoder = TextEncoder(tokenizer, max_length, pair=data.is_pair)
    try:
        return encoder.table(stream(), data.is_pair, data if labelled else None)
    except TextError as error:
        row = next(itertools.islice(stream(), error.row, None))
        raise DataError(f"{row.file}, line {row.line}: {error.reason}") from None


def token_lengths(examples: Iterable[Example], tokenizer: Tokenizer) -> Iterator[tuple[Example, int]]:
    """Each example with its number of tokens, special ones included, before any truncation."""
    rust = truncating_tokenizer(tokenizer, None)
    for chunk in chunks(examples):
        for example, encoding in zip(chunk, rust.encode_batch_fast(_inputs(chunk)), strict=True):
            yield example, len(encoding)


def truncating_tokenizer(tokenizer: Tokenizer, max_length: int | None, *, pair: bool = False) -> Tokenizer:
    """A copy of the tokenizer that truncates at `max_length` and does not pad."""
    rust: Tokenizer = tokenizer.from_str(tokenizer.to_str())
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


def _label_array(labels: Sequence[Any], task: str, classes: Sequence[str]) -> NDArray[Any]:
    """Labels as training reads them; see `TokenTable.labels`."""
    if task == "regression":
        return np.array(labels, np.float32)
    number = {label: number for number, label in enumerate(classes)}
    if task == "single":
        return np.array([number[label] for label in labels], np.int32)
    flags = np.zeros((len(labels), len(classes)), np.uint8)
    for row, names in enumerate(labels):
        flags[row, [number[name] for name in names]] = 1
    return flags


def _inputs(chunk: list[Example]) -> list[str | tuple[str, str]]:
    return [e.text if e.text_pair is None else (e.text, e.text_pair) for e in chunk]
