"""A table of texts -> scores: the one loop over batches, whatever runs the model.

Shapes: T texts, P pieces (see data/tokens.py), B pieces of a batch, C outputs, L layers, H heads.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.batches import Batch, Rows, collate, eval_plan
from budgetformer.data.tokens import TokenTable
from budgetformer.models.config import BudgetFormerConfig
from budgetformer.nn.allocation import Dial

Floats = NDArray[np.float32]


class Outputs(NamedTuple):
    """What an engine computed for a batch. Budgets and entropies are None where the engine does not know them."""

    logits: Floats  # (B, C)
    heads: NDArray[np.int16]  # (B, L) executed heads
    budget: Floats | None = None  # (B, L) predicted s
    entropy: Floats | None = None  # (B, L) of the relevance p, in nats


class Engine(Protocol):
    """Something that runs the model: torch, ONNX Runtime, ..."""

    config: BudgetFormerConfig
    batch_tokens: int  # padded tokens of a batch, by default
    details: bool  # whether it knows budgets and entropies

    def logits(self, batch: Batch, budget: Dial) -> Outputs:
        """The outputs of one batch at a budget."""
        ...

    def session(self, budget: Dial) -> AbstractContextManager[None]:
        """What must hold around a series of batches, such as reproducible random heads."""
        ...


@dataclass(frozen=True, eq=False)
class Scores:
    """What the model computed, piece by piece in the table's order, and what follows from it text by text."""

    table: TokenTable
    task: str
    num_heads: int
    logits: Floats  # (P, C)
    heads: NDArray[np.int16]  # (P, L)
    budget: Floats | None  # (P, L)
    entropy: Floats | None  # (P, L)
    batch_values: Floats | None = None  # (P, C) see `probabilities_of`, by batch: a sigmoid's last bit depends on it

    @cached_property
    def probabilities(self) -> Floats:
        """(T, C), for regression the values. Of a text read in windows: the mean weighted by tokens."""
        values = probabilities_of(self.logits, self.task) if self.batch_values is None else self.batch_values
        if (pieces := self.table.pieces) is None:
            return values
        tokens, first = self.table.lengths, np.cumsum(pieces) - pieces
        return (np.add.reduceat(values * tokens[:, None], first) / self.tokens[:, None]).astype(np.float32)

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """The tokens that were read of each text, special ones and windows' overlaps included. (T,)."""
        pieces, lengths = self.table.pieces, self.table.lengths
        return lengths if pieces is None else np.add.reduceat(lengths, np.cumsum(pieces) - pieces)

    @property
    def heads_per_text(self) -> NDArray[np.int16]:
        """Executed heads by layer, of a text read in windows their mean. (T, L)."""
        if (pieces := self.table.pieces) is None:
            return self.heads
        sums = np.add.reduceat(self.heads, np.cumsum(pieces) - pieces, dtype=np.int64)
        return np.rint(sums / pieces[:, None]).astype(np.int16)

    @property
    def head_share(self) -> Floats:
        """Executed heads of all possible ones. (T,)."""
        share: Floats = (self.heads.mean(1) / self.num_heads).astype(np.float32)
        if (pieces := self.table.pieces) is None:
            return share
        result: Floats = (np.add.reduceat(share, np.cumsum(pieces) - pieces) / pieces).astype(np.float32)
        return result


def probabilities_of(logits: Floats, task: str) -> Floats:
    """Probabilities, for regression the logits as they are. (P, C) -> (P, C)."""
    import torch

    values = torch.from_numpy(logits)
    if task == "multi_label_classification":
        values = values.sigmoid()
    elif task == "single_label_classification":
        values = values.softmax(-1)
    result: Floats = values.numpy()
    return result


def score(
    engine: Engine,
    table: TokenTable,
    budget: Dial | str | None = None,
    *,
    batch_size: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> Scores:
    """Run a table through an engine, shortest pieces first, and put the results back in order.

    Batches hold as many tokens as suits the engine, or `batch_size` pieces. `share` (i, n) runs every n-th batch from
    the i-th on, and the other rows stay zero.
    """
    config, dial, size = engine.config, Dial.parse(budget), len(table)
    shapes: dict[str, tuple[int, type]] = {"logits": (config.labels, np.float32)}
    shapes["heads"] = (config.num_hidden_layers, np.int16)
    if engine.details:
        shapes |= dict.fromkeys(("budget", "entropy"), (config.num_hidden_layers, np.float32))
    results: dict[str, Any] = dict.fromkeys(Outputs._fields)
    results |= {name: np.zeros((size, width), kind) for name, (width, kind) in shapes.items()}
    values = np.zeros((size, config.labels), np.float32)
    with engine.session(dial):
        for rows in _plan(table, config, engine.batch_tokens, batch_size)[share[0] :: share[1]]:
            outputs = engine.logits(collate(table, rows, config.pad_token_id or 0), dial)
            for name in shapes:
                results[name][rows] = getattr(outputs, name)
            values[rows] = probabilities_of(outputs.logits, config.task)
    return Scores(table, config.task, config.num_attention_heads, **results, batch_values=values)


def _plan(table: TokenTable, config: BudgetFormerConfig, batch_tokens: int, batch_size: int | None) -> list[Rows]:
    lengths = table.lengths
    tokens = None if batch_size else max(batch_tokens, int(lengths.max(initial=1)))
    plan = eval_plan(lengths, batch_size=batch_size, token_budget=tokens)
    if not config.gates.get("pool_padding"):
        return plan
    # Padding counts in the gates' mean there, so a text must not be padded by its neighbours.
    return [part for rows in plan for part in np.split(rows, np.flatnonzero(np.diff(lengths[rows])) + 1)]
