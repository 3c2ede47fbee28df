"""Texts -> scores: an encoder for the texts, an engine for the model, a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from budgetformer.data.tokens import TextEncoder, TokenTable
from budgetformer.dial import Dial
from budgetformer.engine.answers import predicted
from budgetformer.engine.scores import Engine, Scores, score

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Scorer:
    """Scores texts, the same whatever else is in the batch. `labels` are the outputs' names (none for regression)."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        max_length: int,
        *,
        budget: Dial | str | None = None,
        long: str = "cut",
    ) -> None:
        self.engine, self.config, self.tokenizer, self.max_length = engine, engine.config, tokenizer, max_length
        self.task = self.config.task
        self.labels = [] if self.task == "regression" else self.config.label_names
        self.budget, self.long = Dial.parse(budget), long
        self._encoder = TextEncoder(tokenizer, max_length, long)

    def score(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Scores:
        """Score texts, with a second text each where the model reads pairs, in their order."""
        return self.run(self.encode(texts, pairs))

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> TokenTable:
        """The first half of `score`: needs the tokenizer alone, and most of it runs without Python's lock."""
        return self._encoder.encode(texts, pairs)

    def answer(self, texts: Sequence[str], pairs: Sequence[str] | None, batch: int) -> NDArray[Any]:
        """Texts -> class numbers (several: 0 or 1 each; regression: values), in batches of this size."""
        scores = score(self.engine, self.encode(texts, pairs), self.budget, batch_size=batch)
        return predicted(scores.probabilities, self.task)

    def run(self, table: TokenTable, budget: Dial | None = None) -> Scores:
        """The second half of `score`; `budget` for once."""
        return score(self.engine, table, budget or self.budget)
