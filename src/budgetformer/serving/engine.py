"""The scorer as the service uses it: texts -> pieces in any thread, pieces -> results on the model's thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetformer.calibrate import named_dial, operating_points
from budgetformer.data import Encoded
from budgetformer.data.pieces import Pieces
from budgetformer.engine.scorer import Scorer
from budgetformer.errors import ModelError, UsageError
from budgetformer.explain import attention, explain
from budgetformer.nn.allocation import Dial
from budgetformer.predict.job import digest
from budgetformer.runs.files import read_json
from budgetformer.serving.settings import DIALS, Settings

Text = tuple[str, str | None]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A text in token ids; `cut` says that some of it was left out."""

    ids: NDArray[np.int32]
    pair_start: int
    cut: bool

    @property
    def tokens(self) -> int:
        return len(self.ids)


class Result(NamedTuple):
    """The model's outputs for a text, and the number of heads that it computed."""

    values: list[float]
    heads: int


class Engine:
    """A run that is ready to answer. `pairs` is None where the run does not say whether it reads pairs."""

    def __init__(self, settings: Settings) -> None:
        folder = settings.run
        self._scorer = scorer = Scorer.from_run(folder)
        scorer.batch_tokens = settings.batch_tokens
        config = scorer.config
        self.points = operating_points(folder)
        self.dials = (*DIALS, "mean") if config.allocator in ("ranked", "order") else DIALS
        self.budget = self.dial(settings.budget)
        self.task, self.labels, self.max_tokens = scorer.task, scorer.labels, scorer.max_length
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.possible = self.layers * self.heads
        self.pairs: bool | None = read_json(folder / "run.json", "give the directory of a run").get("pairs")
        self.hash = digest(folder)[:16]

    def dial(self, text: str) -> Dial:
        """A dial from its text, or by the name of an operating point; the paper's ablations are refused."""
        dial = named_dial(text, self.points)
        if dial.mode not in self.dials:
            shown = (f"{mode}:X" if mode in ("fixed", "max", "mean") else mode for mode in self.dials)
            raise UsageError(f"budget {text!r} is not for this run's service: give one of {', '.join(shown)}")
        return dial

    def encode(self, texts: Sequence[Text]) -> list[Piece]:
        """Tokenise texts that are all pairs or all not; long ones are cut."""
        seconds = [second for _, second in texts if second is not None]
        found = self._scorer.encode([first for first, _ in texts], seconds or None)
        encoded, offsets = found.encoded, found.encoded.offsets
        return [
            Piece(encoded.tokens[offsets[i] : offsets[i + 1]], int(encoded.pair_start[i]), bool(found.cut[i]))
            for i in range(len(texts))
        ]

    def run(self, pieces: Sequence[Piece], dial: Dial) -> list[Result]:
        """The model on one batch."""
        lengths = [piece.tokens for piece in pieces]
        rows = len(pieces)
        encoded = Encoded(
            tokens=np.concatenate([piece.ids for piece in pieces]),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            labels=np.zeros(rows, np.float32),
            pair_start=np.array([piece.pair_start for piece in pieces], np.int32),
            lines=np.arange(rows),
            cut=0,
            has_pairs=any(piece.pair_start for piece in pieces),
        )
        cut = np.array([piece.cut for piece in pieces])
        scores = self._scorer.run(Pieces(encoded, np.ones(rows, np.int64), cut), dial)
        heads = scores.heads.sum(1).tolist()
        return [Result(*both) for both in zip(scores.probabilities.tolist(), heads, strict=True)]

    def render(self, piece: Piece, result: Result, top: int | None) -> dict[str, Any]:
        """The answer for one text, as JSON."""
        answer: dict[str, Any] = {}
        if self.task == "regression":
            answer["value"] = result.values[0]
        else:
            order = sorted(range(len(self.labels)), key=lambda i: -result.values[i])
            shown = {self.labels[i]: round(result.values[i], 6) for i in order[:top]}
            if self.task == "multi_label_classification":
                answer["labels"] = [self.labels[i] for i in order if result.values[i] >= 0.5]
            else:
                answer["label"], answer["score"] = next(iter(shown.items()))
            answer["probabilities"] = shown
        heads = {"used": result.heads, "possible": self.possible}
        return {**answer, "heads": heads, "tokens": piece.tokens, "cut": piece.cut}

    def explain(self, text: Text, dial: Dial) -> dict[str, Any]:
        """The answer for a text, with every layer's heads and what they cost."""
        return explain(self._scorer.model, self._scorer.tokenizer, *text, dial, self.max_tokens)

    def attention(self, text: Text, dial: Dial, layer: int, head: int) -> dict[str, Any]:
        """Where one head looks."""
        return attention(self._scorer.model, self._scorer.tokenizer, *text, layer, head, dial, self.max_tokens)

    def self_test(self) -> None:
        """Run a short and a long text together, and see that the answers can be answers."""
        texts = ("test", "word " * self.max_tokens)
        pieces = self.encode([(text, text if self.pairs else None) for text in texts])
        for piece, result in zip(pieces, self.run(pieces, self.budget), strict=True):
            sane = all(map(math.isfinite, result.values)) and 0 <= result.heads <= self.possible
            if not sane or not 0 < piece.tokens <= self.max_tokens:
                raise ModelError("the model's answers are not finite, or it reads too much: train or copy it again")
