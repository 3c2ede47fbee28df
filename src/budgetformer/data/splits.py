"""Which row belongs to which split, and which texts occur twice: arrays in, arrays out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


def text_hash(text: str, text_pair: str | None) -> int:
    """64 bits that are equal for texts equal up to case and white space."""
    key = " ".join(text.casefold().split())
    if text_pair is not None:
        key += "\x1f" + " ".join(text_pair.casefold().split())
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def carve(hashes: Hashes, strata: NDArray[np.int32], fractions: Sequence[float], seed: int) -> NDArray[np.uint8]:
    """The part of each row: i for the i-th fraction (from 1), 0 for what remains.

    Each part holds its share of every stratum, up to rounding; a stratum always keeps a text in part 0, and
    rows with the same text stay together. A part is empty only if its fraction is 0 or nothing can be spared.
    """
    _, first, text_of_row = np.unique(hashes, return_index=True, return_inverse=True)
    order = _by_stratum(strata[first], seed)
    stratum = strata[first][order]
    spare = order[1:][stratum[1:] == stratum[:-1]]  # all but one of each stratum
    part = np.zeros(len(first), np.uint8)
    for number, size in enumerate(part_sizes(len(first), len(first) - len(spare), fractions), 1):
        picked = sample_rows(len(spare), size)
        part[spare[picked]] = number
        spare = np.delete(spare, picked)
    return part[text_of_row]


def part_sizes(texts: int, strata: int, fractions: Sequence[float]) -> list[int]:
    """How many different texts each part gets: its share, at least one, as long as each stratum keeps a text."""
    sizes, spare = [], texts - strata
    for fraction in fractions:
        sizes.append(min(max(1, round(fraction * texts)), spare) if fraction else 0)
        spare -= sizes[-1]
    return sizes


def subset(strata: NDArray[np.int32], size: int, seed: int) -> NDArray[np.int64]:
    """The rows of a random subset that keeps the balance of the strata, in ascending order."""
    order = _by_stratum(strata, seed)
    return np.sort(order[sample_rows(len(order), size)])


def quantile_bins(values: NDArray[np.float64], bins: int = 10) -> NDArray[np.int32]:
    """Strata for numbers: equally filled bins."""
    edges = np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1]) if len(values) else np.zeros(0)
    return np.searchsorted(edges, values, side="right").astype(np.int32)


def pool_rare(strata: NDArray[np.int32]) -> NDArray[np.int32]:
    """Strata of one row each become one stratum together, so that they too can be spread over the splits."""
    return np.where(np.bincount(strata)[strata] > 1, strata, -1).astype(np.int32)


def repeats(hashes: Hashes) -> int:
    """How many rows repeat a text that another row has already."""
    return len(hashes) - len(np.unique(hashes))


def overlap(rows: Hashes, other: Hashes) -> NDArray[np.bool_]:
    """Which rows have a text that the other split has too."""
    return np.isin(rows, other)


def sample_rows(total: int, n: int) -> NDArray[np.int64]:
    """The one way to take a sample of a split: n of `total` rows, evenly spaced, ascending; all if there are fewer.

    Never the first n: many files are sorted by class.
    """
    n = min(n, total)
    return ((np.arange(n) + 0.5) * (total / max(n, 1))).astype(np.int64)


def _by_stratum(strata: NDArray[np.int32], seed: int) -> NDArray[np.int64]:
    order = np.random.default_rng(seed).permutation(len(strata))
    return np.asarray(order[np.argsort(strata[order], kind="stable")])
