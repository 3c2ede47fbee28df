"""Which rows make a batch, and the batch itself.

Shapes: B rows of a batch, N tokens of its longest row, C labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.tokens import TokenTable
from budgetformer.errors import UsageError

if TYPE_CHECKING:
    import torch

Rows = NDArray[np.int64]

_ALONE = 2048  # tokens of one length that are a batch of their own


@dataclass(frozen=True, eq=False)
class Batch:
    """Padded token ids (B, N), mask (True on tokens), segment numbers if the data has pairs, and labels if known:
    int64 (B,) classes, float32 (B,) numbers or float32 (B, C) of 0 and 1; the words' logits if known. `rows` are the
    table's pieces."""

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.bool_]
    token_type_ids: NDArray[np.int64] | None
    labels: NDArray[Any] | None
    rows: Rows
    words_logits: NDArray[np.float32] | None = None

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """What a model takes, by name: all but `rows`, and only what is there."""
        import torch

        return {
            name: torch.from_numpy(value).to(device)
            for name, value in vars(self).items()
            if value is not None and name != "rows"
        }


def plan_epoch(
    lengths: NDArray[Any],
    *,
    batch_size: int | None = None,
    token_budget: int | None = None,
    seed: int,
    epoch: int,
    window: int = 8192,
) -> list[Rows]:
    """The batches of one epoch, as row numbers: every row once, none empty, equal for equal arguments.

    Rows are shuffled, sorted by length within windows so that a batch pads little, and the batches are
    shuffled again. A batch has `batch_size` rows (one may have fewer), or `token_budget` tokens at most,
    padding included.
    """
    _check(lengths, batch_size, token_budget)
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    if batch_size is not None:
        window = max(1, window // batch_size) * batch_size
    batches: list[Rows] = []
    for start in range(0, len(order), window):
        rows = order[start : start + window]
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        batches += _cut(rows, lengths, batch_size, token_budget)
    return [batches[i] for i in rng.permutation(len(batches))]


def eval_plan(lengths: NDArray[Any], *, batch_size: int | None = None, token_budget: int | None = None) -> list[Rows]:
    """Batches of rows sorted by length, shortest first, with nothing left to chance.

    Within a token budget rows of different lengths share a batch only where those of one length are few: a batch
    without padding runs much faster than one with a little.
    """
    _check(lengths, batch_size, token_budget)
    rows = np.argsort(lengths, kind="stable")
    if token_budget is None:
        return _cut(rows, lengths, batch_size, None)
    sums, start, plan = np.concatenate([[0], np.cumsum(lengths[rows])]), 0, []
    for end in [*(np.flatnonzero(np.diff(lengths[rows])) + 1).tolist(), len(rows)]:
        if end == len(rows) or sums[end] - sums[start] >= min(_ALONE, token_budget):
            plan += _cut(rows[start:end], lengths, None, token_budget)
            start = end
    return plan


def collate(table: TokenTable, rows: Rows, pad_id: int) -> Batch:
    """These pieces of a table as one padded batch."""
    start = table.offsets[rows]
    length = table.offsets[rows + 1] - start
    place = np.arange(length.max())
    mask = place < length[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = table.tokens[(start[:, None] + place)[mask]]
    types = None
    if table.has_pairs:
        second = table.pair_start[rows][:, None]
        types = (mask & (second > 0) & (place >= second)).astype(np.int64)
    labels = None
    if table.labels is not None and table.pieces is None:
        labels = table.labels[rows].astype(np.int64 if table.labels.dtype == np.int32 else np.float32)
    return Batch(ids, mask, types, labels, rows, None if table.words_logits is None else table.words_logits[rows])


def _check(lengths: NDArray[Any], batch_size: int | None, token_budget: int | None) -> None:
    if (batch_size is None) == (token_budget is None):
        raise UsageError(f"give either batch_size ({batch_size}) or token_budget ({token_budget})")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}: it must be at least 1")
    longest = int(lengths.max(initial=0))
    if token_budget is not None and token_budget < longest:
        raise UsageError(
            f"token_budget is {token_budget}, but the longest row has {longest} tokens: raise it or lower max_length"
        )


def _cut(rows: Rows, lengths: NDArray[Any], batch_size: int | None, token_budget: int | None) -> list[Rows]:
    if batch_size is not None:
        return [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    assert token_budget is not None
    batches, start = [], 0
    while start < len(rows):
        most = token_budget // max(1, int(lengths[rows[start]]))
        ahead = lengths[rows[start : start + most]]
        padded = np.arange(1, len(ahead) + 1) * ahead  # rows are sorted, so this grows
        size = int(np.searchsorted(padded, token_budget, side="right"))
        batches.append(rows[start : start + size])
        start += size
    return batches
