"""Tables of made-up token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from budgetformer.data.tokens import TokenTable


def make_table(
    tokens: Any, lengths: Sequence[int], labels: Any = None, pair_start: Sequence[int] | None = None
) -> TokenTable:
    """Rows of these lengths, one after the other; lines are counted from 1."""
    rows = len(lengths)
    return TokenTable(
        tokens=np.asarray(tokens, np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        pair_start=np.array(pair_start or [0] * rows, np.int32),
        has_pairs=any(pair_start or ()),
        lines=np.arange(1, rows + 1),
        truncated=np.zeros(rows, bool),
        labels=None if labels is None else np.asarray(labels),
    )
