"""Rank correlations, intervals and thirds, on numpy alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959963984540054
# Student's t, two-sided 95 %, for 1 to 10 degrees of freedom; beyond, the tenth errs on the wide side.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class Estimate(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean with Student's interval over seeds; no interval (equal ends) where there is one seed."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, mean, mean)
    half = _T95[min(len(values) - 1, len(_T95)) - 1] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def over_rows(values: NDArray[Any]) -> Estimate:
    """The mean of a figure that every row has, with the normal interval over rows."""
    mean = float(np.mean(values))
    half = Z95 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Estimate(mean, mean - half, mean + half)


def difference(a: NDArray[Any], b: NDArray[Any]) -> Estimate:
    """The difference of the means of two unrelated groups, with Welch's normal interval."""
    first, second = over_rows(a), over_rows(b)
    half = math.hypot(first.high - first.value, second.high - second.value)
    value = first.value - second.value
    return Estimate(value, value - half, value + half)


def ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], np.float64)


def pearson(a: NDArray[Any], b: NDArray[Any]) -> float:
    """The correlation; zero where one of the two does not vary."""
    x, y = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def spearman(a: NDArray[Any], b: NDArray[Any]) -> Estimate:
    """The rank correlation with Fisher's interval (Bonett and Wright's variance)."""
    return _fisher(pearson(ranks(np.asarray(a)), ranks(np.asarray(b))), len(a))


def partial_spearman(a: NDArray[Any], b: NDArray[Any], given: NDArray[Any]) -> Estimate:
    """The rank correlation of two figures with a third one held equal, with Fisher's interval."""
    x, y, z = (ranks(np.asarray(v)) for v in (a, b, given))
    xy, xz, yz = pearson(x, y), pearson(x, z), pearson(y, z)
    scale = math.sqrt((1 - xz**2) * (1 - yz**2))
    return _fisher((xy - xz * yz) / scale if scale else 0.0, len(x) - 1)


def _fisher(r: float, n: int) -> Estimate:
    r = max(-1.0, min(1.0, r))
    if n < 5 or abs(r) > 1 - 1e-12:
        return Estimate(r, r if n >= 5 else -1.0, r if n >= 5 else 1.0)
    half = Z95 * math.sqrt((1 + r * r / 2) / (n - 3))
    centre = math.atanh(r)
    return Estimate(r, math.tanh(centre - half), math.tanh(centre + half))


def thirds(values: NDArray[Any]) -> NDArray[np.int64]:
    """The third of the sorted rows that each row falls into: 0, 1 or 2. Equal values keep their order."""
    place = np.empty(len(values), np.int64)
    place[np.argsort(values, kind="stable")] = np.arange(len(values))
    return place * 3 // max(1, len(values))


def box(values: NDArray[Any]) -> dict[str, Any]:
    """Count, mean and the 5, 25, 50, 75 and 95 % quantiles."""
    if not len(values):
        return {"n": 0, "mean": None, "q": []}
    return {
        "n": len(values),
        "mean": float(np.mean(values, dtype=np.float64)),
        "q": [float(q) for q in np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95))],
    }
