"""Estimates with their 95 % intervals, rank correlations, thirds and quantiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Z95 = float(stats.norm.ppf(0.975))


class Estimate(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def student_interval(values: Sequence[float]) -> Estimate:
    """The mean with Student's interval over seeds; no interval (equal ends) where there is one seed."""
    mean = float(np.mean(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)) if len(values) > 1 else 0.0
    return Estimate(mean, mean - half, mean + half)


def over_rows(values: NDArray[Any]) -> Estimate:
    """The mean of a figure that every row has, with the normal interval over rows."""
    mean = float(np.mean(values))
    half = Z95 * float(stats.sem(values)) if len(values) > 1 else math.inf
    return Estimate(mean, mean - half, mean + half)


def difference(a: NDArray[Any], b: NDArray[Any]) -> Estimate:
    """The difference of the means of two unrelated groups, with Welch's normal interval."""
    first, second = over_rows(a), over_rows(b)
    half = math.hypot(first.high - first.value, second.high - second.value)
    value = first.value - second.value
    return Estimate(value, value - half, value + half)


def rank_correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Spearman's; zero where one of the two does not vary."""
    return float(stats.spearmanr(a, b).statistic) if np.ptp(a) and np.ptp(b) else 0.0


def spearman(a: NDArray[Any], b: NDArray[Any]) -> Estimate:
    """The rank correlation with Fisher's interval (Bonett and Wright's variance)."""
    return _fisher(rank_correlation(a, b), len(a))


def partial_spearman(a: NDArray[Any], b: NDArray[Any], third: NDArray[Any]) -> Estimate:
    """The rank correlation of two figures with a third one held equal, with Fisher's interval."""
    ab, ac, bc = rank_correlation(a, b), rank_correlation(a, third), rank_correlation(b, third)
    scale = math.sqrt((1 - ac**2) * (1 - bc**2))
    return _fisher((ab - ac * bc) / scale if scale else 0.0, len(a) - 1)


def _fisher(r: float, n: int) -> Estimate:
    r = max(-1.0, min(1.0, r))
    if n < 5 or abs(r) > 1 - 1e-12:
        return Estimate(r, r if n >= 5 else -1.0, r if n >= 5 else 1.0)
    half = Z95 * math.sqrt((1 + r * r / 2) / (n - 3))
    centre = math.atanh(r)
    return Estimate(r, math.tanh(centre - half), math.tanh(centre + half))


def thirds(values: NDArray[Any]) -> NDArray[np.int64]:
    """The third of the sorted rows that each row falls into: 0, 1 or 2. Equal values keep their order."""
    return np.asarray((stats.rankdata(values, method="ordinal") - 1) * 3 // max(1, len(values)), np.int64)
