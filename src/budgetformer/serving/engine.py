"""A run as the service uses it: texts -> token tables in any thread, tables -> scores on the model's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.tokens import TokenTable
from budgetformer.engine.answers import named, ranking, rounded
from budgetformer.engine.scores import score
from budgetformer.errors import ModelError, UsageError
from budgetformer.explain import attention, explain
from budgetformer.nn.allocation import Dial
from budgetformer.runs.run import Run
from budgetformer.serving.settings import DIALS, Settings

Text = tuple[str, str | None]


class Work(NamedTuple):
    """One text in token ids: a table of one row."""

    table: TokenTable

    @property
    def tokens(self) -> int:
        return len(self.table.tokens)

    @property
    def truncated(self) -> bool:
        return bool(self.table.truncated[0])


class Result(NamedTuple):
    """The model's probabilities (for regression its value) for a text, and the number of heads that it computed."""

    values: NDArray[np.float32]  # (C,)
    heads: int


class Engine:
    """A run that is ready to answer."""

    def __init__(self, settings: Settings) -> None:
        self.source = run = Run.open(settings.run)
        self._scorer = scorer = run.scorer()
        self._batch_tokens = settings.batch_tokens
        config = scorer.config
        self.points = run.points
        self.dials = (*DIALS, "mean") if config.gate.ranks_layers else DIALS
        self.budget = self.dial(settings.budget)
        self.task, self.labels, self.max_tokens = scorer.task, scorer.labels, scorer.max_length
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.possible = self.layers * self.heads
        self.pairs = run.pairs
        self.hash = run.digest[:16]

    def dial(self, text: str) -> Dial:
        """A dial from its text, or by the name of an operating point; the paper's ablations are refused."""
        dial = self.source.budget(text)
        if dial.mode not in self.dials:
            shown = (f"{mode}:X" if mode in ("fixed", "max", "mean") else mode for mode in self.dials)
            raise UsageError(f"budget {text!r} is not for this run's service: give one of {', '.join(shown)}")
        return dial

    def encode(self, texts: Sequence[Text]) -> list[Work]:
        """Tokenise texts that are all pairs or all not; long ones are truncated."""
        seconds = [second for _, second in texts if second is not None]
        return [Work(row) for row in self._scorer.encode([first for first, _ in texts], seconds or None).rows()]

    def run(self, works: Sequence[Work], dial: Dial) -> list[Result]:
        """The model on one batch."""
        table = TokenTable.join([work.table for work in works])
        scores = score(self._scorer.engine, table, dial, batch_size=len(table))
        return [Result(*row) for row in zip(scores.probabilities, scores.heads.sum(1).tolist(), strict=True)]

    def render(self, work: Work, result: Result, top: int | None) -> dict[str, Any]:
        """The answer for one text, as JSON."""
        probabilities = result.values[None]
        values = rounded(probabilities, self.task)[0].tolist()
        answer: dict[str, Any] = {}
        if self.task == "regression":
            answer["value"] = values[0]
        else:
            order = ranking(probabilities)[0].tolist()
            shown = {self.labels[i]: values[i] for i in order[:top]}
            if self.task == "multi_label_classification":
                chosen = named(probabilities, self.task, self.labels)[0]
                answer["labels"] = [self.labels[i] for i in order if self.labels[i] in chosen]
            else:
                answer["label"], answer["score"] = next(iter(shown.items()))
            answer["probabilities"] = shown
        heads = {"used": result.heads, "possible": self.possible}
        return {**answer, "heads": heads, "tokens": work.tokens, "cut": work.truncated}

    def explain(self, text: Text, dial: Dial) -> dict[str, Any]:
        """The answer for a text, with every layer's heads and what they cost."""
        return explain(self.source.model, self._scorer.tokenizer, *text, dial, self.max_tokens)

    def attention(self, text: Text, dial: Dial, layer: int, head: int) -> dict[str, Any]:
        """Where one head looks."""
        return attention(self.source.model, self._scorer.tokenizer, *text, layer, head, dial, self.max_tokens)

    def self_test(self) -> None:
        """Run a short and a long text together, and see that the answers can be answers."""
        texts = ("test", "word " * self.max_tokens)
        works = self.encode([(text, text if self.pairs else None) for text in texts])
        for work, result in zip(works, self.run(works, self.budget), strict=True):
            if (
                not np.isfinite(result.values).all()
                or not 0 <= result.heads <= self.possible
                or not 0 < work.tokens <= self.max_tokens
            ):
                raise ModelError("the model's answers are not finite, or it reads too much: train or copy it again")
