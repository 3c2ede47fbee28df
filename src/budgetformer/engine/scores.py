"""A table of texts -> scores: the one loop over batches, whatever runs the model.

Shapes: T texts, P pieces (see data/tokens.py), B pieces of a batch, C outputs, L layers, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from budgetformer.cost.flops import Execution, Flops, count
from budgetformer.data.batches import Batch, Rows, collate, eval_plan
from budgetformer.data.tokens import TokenTable
from budgetformer.dial import Dial
from budgetformer.errors import ModelError
from budgetformer.exits import AfterStage, Exits, StageResult
from budgetformer.spec import ModelSpec

Floats = NDArray[np.float32]


class Outputs(NamedTuple):
    """What an engine computed for a batch. Budgets and entropies are None where the engine does not know them."""

    logits: Floats  # (B, C)
    heads: NDArray[np.int16]  # (B, L) executed heads
    budget: Floats | None = None  # (B, L) predicted s
    entropy: Floats | None = None  # (B, L) of the relevance p, in nats
    exits: NDArray[np.int64] | None = None  # (B,) the stage at which each piece left, of a model with exits
    stage_logits: Floats | None = None  # (B, S, C) the answers of all stages, where nothing could leave early
    groups: NDArray[np.int16] | None = None  # (B, L) executed groups of feed-forward neurons, where they have gates


class Engine(Protocol):
    """Something that runs the model: torch, ONNX Runtime, ..."""

    @property
    def config(self) -> ModelSpec: ...

    name: str  # what guarantees hold for
    version: str  # of the library that computes
    batch_tokens: int  # padded tokens of a batch, by default
    details: bool  # whether it knows budgets and entropies

    def logits(self, batch: Batch, budget: Dial, after: AfterStage | None = None) -> Outputs:
        """Outputs of one batch at a budget; `after` gets each stage's result but the last and returns who leaves."""
        ...

    def check(self, budget: Dial) -> Dial:
        """The budget; UsageError where the model cannot be set to it."""
        ...

    def words(self, table: TokenTable) -> Floats | None:
        """The logits of the stage of words for every piece; None where the model has none."""
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
    exits: NDArray[np.int64] | None = None  # (P,)
    stage_logits: Floats | None = None  # (P, S, C) not yet divided by the temperatures
    groups: NDArray[np.int16] | None = None  # (P, L)

    @cached_property
    def probabilities(self) -> Floats:
        """(T, C), for regression the values. Of a text read in windows: the mean weighted by tokens."""
        result = probabilities_of(self.logits, self.task)
        if (pieces := self.table.pieces) is None:
            return result
        tokens, first = self.table.lengths, np.cumsum(pieces) - pieces
        return (np.add.reduceat(result * tokens[:, None], first) / self.tokens[:, None]).astype(np.float32)

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
    def exits_per_text(self) -> NDArray[np.int64]:
        """The stage at which each text left, of one read in windows the latest. (T,)."""
        assert self.exits is not None
        pieces = self.table.pieces
        return self.exits if pieces is None else np.maximum.reduceat(self.exits, np.cumsum(pieces) - pieces)

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
    values = logits.astype(np.float64)  # so that no last bit depends on a row's place in the array
    if task == "multi_label_classification":
        values = 1 / (1 + np.exp(-np.clip(values, -700, 700)))
    elif task == "single_label_classification":
        values = np.exp(values - values.max(axis=1, keepdims=True))
        values /= values.sum(axis=1, keepdims=True)
    return values.astype(np.float32)


def leave_early(scores: Scores, stages: Exits, limit: float) -> Scores:
    """What `score` gives at a limit, from the answers of all stages: the definition, without running anything."""
    assert scores.stage_logits is not None
    return stop_at(scores, stages, stages.leave(scores.stage_logits, limit))


def stop_at(scores: Scores, stages: Exits, exits: NDArray[np.int64]) -> Scores:
    """What each row's answer and path would be if it left at its number in `exits` (P,)."""
    assert scores.stage_logits is not None
    ran = np.arange(scores.heads.shape[1]) < np.array(stages.depths)[exits][:, None]
    return replace(
        scores,
        logits=scores.stage_logits[np.arange(len(exits)), exits] / stages.temperatures[exits, None],
        heads=scores.heads * ran,
        budget=None if scores.budget is None else scores.budget * ran,
        entropy=None if scores.entropy is None else scores.entropy * ran,
        groups=None if scores.groups is None else scores.groups * ran,
        exits=exits,
    )


def executed_flops(
    scores: Scores, config: ModelSpec, execution: Execution
) -> Iterator[tuple[NDArray[np.int64], Flops]]:
    """The FLOPs of each piece, for the pieces that left at one stage after the other: their numbers, and arrays."""
    stages, shape, exits = config.stages, config.shape, scores.exits
    exits = np.full(len(scores.heads), len(stages.depths) - 1) if exits is None else exits
    for stage in np.unique(exits).tolist():
        rows = np.flatnonzero(exits == stage)
        path: dict[str, Any] = {"layers": stages.depths[stage], "exits": stages.heads[stage]}
        frozen = None if config.frozen_groups is None else config.frozen_groups[: stages.depths[stage]]
        path["groups"] = frozen if scores.groups is None else list(scores.groups[rows].T)
        yield rows, count(shape, scores.table.lengths[rows], list(scores.heads[rows].T), execution, **path)


def flops_per_text(scores: Scores, config: ModelSpec) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What each text cost in FLOPs, and what it costs the dense model. (T,), (T,)."""
    lengths, used = scores.table.lengths, np.zeros(len(scores.heads))
    for rows, flops in executed_flops(scores, config, "selective" if config.gate.selects else "dense"):
        used[rows] = flops.total
    dense = np.asarray(count(replace(config.shape, words=False), lengths, (), "dense").total, float)
    if (pieces := scores.table.pieces) is not None:
        first = np.cumsum(pieces) - pieces
        used, dense = np.add.reduceat(used, first), np.add.reduceat(dense, first)
    return used, dense


def cost_shares(scores: Scores, config: ModelSpec) -> Floats:
    """What each text cost, as a share of the dense model's FLOPs for it. (T,)."""
    used, dense = flops_per_text(scores, config)
    shares: Floats = (used / dense).astype(np.float32)
    return shares


def score(
    engine: Engine,
    table: TokenTable,
    budget: Dial | str | None = None,
    *,
    batch_size: int | None = None,
    share: tuple[int, int] = (0, 1),
    words: Floats | None = None,
    after: AfterStage | None = None,
) -> Scores:
    """Run a table through an engine, shortest pieces first, and put the results back in order.

    Batches hold as many tokens as suits the engine, or `batch_size` pieces. `share` (i, n) runs every n-th batch from
    the i-th on, and the other rows stay zero. `words` are the answers of the stage of words where they are known, and
    `after` sees the pieces after every stage but the last and says which of them leave.
    """
    config, dial, size = engine.config, Dial.parse(budget), len(table)
    limit, stages = config.exit_limit(dial), config.stages
    layers, outputs = config.num_hidden_layers, config.labels
    shapes: dict[str, tuple[tuple[int, ...], type]]
    shapes = {"logits": ((outputs,), np.float32), "heads": ((layers,), np.int16)}
    if config.groups and engine.details:
        shapes["groups"] = ((layers,), np.int16)
    if engine.details:
        shapes |= dict.fromkeys(("budget", "entropy"), ((layers,), np.float32))
    if config.exits:
        shapes["exits"] = ((), np.int64)
        if not limit and after is None and len(stages.depths) > 1:
            shapes["stage_logits"] = ((len(stages.depths), outputs), np.float32)
    results: dict[str, Any] = dict.fromkeys(Outputs._fields)
    results |= {name: np.zeros((size, *shape), kind) for name, (shape, kind) in shapes.items()}
    going_on = np.arange(size)
    if words is None:
        words = engine.words(table)
    if words is not None:
        table = replace(table, words_logits=words)
        leaves = stages.leaves(0, words, limit) if len(stages.depths) > 1 else np.zeros(size, bool)
        if after is not None:
            leaves = after(StageResult(0, going_on, words, np.zeros((size, 0), np.int16), leaves))
        results["logits"][leaves], going_on = words[leaves] / stages.temperatures[0], np.flatnonzero(~leaves)
    with engine.session(dial):
        for batch in _plan(table.lengths[going_on], config, engine.batch_tokens, batch_size)[share[0] :: share[1]]:
            rows = going_on[batch]
            hook = None if after is None else partial(_of_rows, after, rows)
            result = engine.logits(collate(table, rows, config.pad_token_id), dial, hook)
            for name in shapes:
                results[name][rows] = getattr(result, name)
    if not np.isfinite(results["logits"]).all():
        raise ModelError(
            "the model's answers are not finite: its weights are damaged, or its training diverged; copy or train it "
            "again"
        )
    return Scores(table, config.task, config.num_attention_heads, **results)


def _of_rows(after: AfterStage, rows: Rows, result: StageResult) -> NDArray[np.bool_]:
    """`after` for a batch: rows by their numbers in the table, and without the words' stage, which it has had."""
    words = not result.heads.shape[1]
    return result.leaves if words else after(result._replace(rows=rows[result.rows]))


def _plan(lengths: NDArray[np.int64], config: ModelSpec, batch_tokens: int, batch_size: int | None) -> list[Rows]:
    tokens = None if batch_size else max(batch_tokens, int(lengths.max(initial=1)))
    plan = eval_plan(lengths, batch_size=batch_size, token_budget=tokens)
    if not config.gate.pool_padding:
        return plan
    return [part for rows in plan for part in np.split(rows, np.flatnonzero(np.diff(lengths[rows])) + 1)]
