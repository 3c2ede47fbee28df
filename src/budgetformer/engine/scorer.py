"""A model and its tokenizer -> answers for texts, the same whatever else is in the batch.

Shapes: R texts, P pieces (see pieces.py), C outputs, L layers, H heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from budgetformer.calibrate import read_dial
from budgetformer.data import Batch, collate, eval_plan
from budgetformer.data.pieces import Cutter, Pieces
from budgetformer.evaluate import eval_tokens
from budgetformer.models.model import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.nn.allocation import Dial
from budgetformer.runs.run import load_run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, eq=False)
class Scores:
    """What the model says, text by text. Of a text read in windows: the mean weighted by tokens, the heads' mean."""

    probabilities: NDArray[np.float32]  # (R, C); for regression the values
    heads: NDArray[np.int16]  # (R, L) executed heads
    share: NDArray[np.float32]  # (R,) executed heads of all possible ones
    cut: NDArray[np.bool_]  # (R,) whether some of the text was left out
    tokens: NDArray[np.int64]  # (R,) read, special ones and windows' overlaps included


class AnyScorer(ABC):
    """Scores texts. `labels` are the outputs' names (none for regression), `task` is the model's problem type."""

    def __init__(
        self,
        config: BudgetFormerConfig,
        tokenizer: PreTrainedTokenizerFast,
        max_length: int,
        *,
        dial: Dial,
        long: str = "cut",
        batch_tokens: int,
    ) -> None:
        self.config, self.tokenizer, self.max_length = config, tokenizer, max_length
        self.task = config.task
        self.labels = [] if self.task == "regression" else config.label_names
        self.dial, self.long, self.batch_tokens = dial, long, batch_tokens
        self._cutter = Cutter(tokenizer, max_length, long)

    @abstractmethod
    def _compute(self, batch: Batch, dial: Dial) -> tuple[torch.Tensor, NDArray[Any]]:
        """Logits (B, C) and executed heads (B, L) of a batch."""

    def score(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Scores:
        """Score texts, with a second text each where the model reads pairs, in the order given."""
        return self.run(self.encode(texts, pairs))

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Pieces:
        """The first half of `score`: needs the tokenizer alone, and most of it runs without Python's lock."""
        return self._cutter.encode(texts, pairs)

    def run(self, pieces: Pieces, dial: Dial | None = None) -> Scores:
        """The second half of `score`: the model on pieces, shortest first, put back in order; `dial` for once."""
        encoded, config, dial = pieces.encoded, self.config, dial or self.dial
        values = np.empty((len(encoded), config.labels), np.float32)
        heads = np.empty((len(encoded), config.num_hidden_layers), np.int16)
        with self._repeatable(dial), torch.inference_mode():
            for chosen in self._batches(encoded.lengths):
                logits, heads[chosen] = self._compute(collate(encoded, chosen, config.pad_token_id or 0), dial)
                values[chosen] = self._probabilities(logits.float()).cpu().numpy()
        share = (heads.mean(1) / config.num_attention_heads).astype(np.float32)
        tokens, counts = encoded.lengths, pieces.counts
        if len(encoded) > len(counts):  # windows
            first = np.cumsum(counts) - counts
            total = np.add.reduceat(tokens, first)
            values = (np.add.reduceat(values * tokens[:, None], first) / total[:, None]).astype(np.float32)
            heads = np.rint(np.add.reduceat(heads, first, dtype=np.int64) / counts[:, None]).astype(np.int16)
            share, tokens = (np.add.reduceat(share, first) / counts).astype(np.float32), total
        return Scores(values, heads, share, pieces.cut, tokens)

    def _batches(self, lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        budget = max(self.batch_tokens, int(lengths.max(initial=1)))
        for rows in eval_plan(lengths, token_budget=budget):
            if self.config.pool_padding:  # padding counts there, so a text must not be padded by its neighbours
                yield from np.split(rows, np.flatnonzero(np.diff(lengths[rows])) + 1)
            else:
                yield rows

    def _probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        if self.task == "regression":
            return logits
        return logits.sigmoid() if self.task == "multi_label_classification" else logits.softmax(-1)

    def _repeatable(self, dial: Dial) -> AbstractContextManager[None]:
        return nullcontext()


class Scorer(AnyScorer):
    """A torch model, scoring texts."""

    def __init__(
        self,
        model: BudgetFormerForSequenceClassification,
        tokenizer: PreTrainedTokenizerFast,
        max_length: int,
        *,
        dial: Dial | str | None = None,
        long: str = "cut",
    ) -> None:
        tokens = eval_tokens(model.device)
        super().__init__(model.config, tokenizer, max_length, dial=Dial.parse(dial), long=long, batch_tokens=tokens)
        self.model = model.train(False)

    @classmethod
    def from_run(cls, folder: Path, budget: str | None = None, long: str = "cut", device: str | None = None) -> Scorer:
        """The scorer of a finished run, on `device` (default: a GPU if there is one).

        `budget` is a dial, or the name of one of the run's operating points.
        """
        dial = read_dial(budget, folder)
        model, tokenizer, record = load_run(folder)
        place: Any = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model.to(place)
        return cls(model, tokenizer, record["max_length"], dial=dial, long=long)

    def _compute(self, batch: Batch, dial: Dial) -> tuple[torch.Tensor, NDArray[Any]]:
        batch = batch.to(self.model.device)
        out: Any = self.model(batch.input_ids, batch.attention_mask, token_type_ids=batch.token_type_ids, budget=dial)
        return out.logits, torch.stack([a.active.sum(-1) for a in out.allocations], 1).cpu().numpy()

    @contextmanager
    def _repeatable(self, dial: Dial) -> Iterator[None]:
        """The paper's ablations with random heads draw the same numbers at every call; nothing else is random."""
        if dial.mode != "random" and self.model.config.allocator != "random":
            yield
            return
        with torch.random.fork_rng([self.model.device] if self.model.device.type == "cuda" else []):
            torch.manual_seed(0)
            yield
