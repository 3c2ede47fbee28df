from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetformer_reproduction.statistics import (
    difference,
    over_rows,
    partial_spearman,
    rank_correlation,
    spearman,
    student_interval,
    thirds,
)


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    assert rank_correlation(np.array([10, 20, 20, 5]), np.array([2, 3.5, 3.5, 1])) == pytest.approx(1)
    assert rank_correlation(np.array([1, 2]), np.array([5, 4])) == pytest.approx(-1)
    assert rank_correlation(np.array([1]), np.array([5])) == 0


def test_spearman_by_hand() -> None:
    # Squared rank differences 1, 1, 1, 1, 0: 1 - 6 * 4 / (5 * 24) = 0.8.
    assert spearman(np.array([1, 2, 3, 4, 5]), np.array([20, 10, 40, 30, 50])).value == pytest.approx(0.8)
    # With a tie: ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4; covariance 4.5, variances 4.5 and 5.
    assert spearman(np.array([1, 2, 2, 3]), np.array([1, 2, 3, 4])).value == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman(np.array([1, 2, 3]), np.array([7, 7, 7])).value == 0


def test_partial_spearman_by_hand() -> None:
    a, b, c = np.array([1, 2, 3, 4, 5]), np.array([2, 1, 4, 3, 5]), np.array([5, 3, 4, 2, 1])
    # Rank correlations: ab 0.8; ac: differences 4, 1, 1, 2, 4 squared sum 38, 1 - 228/120 = -0.9; bc: 3, 2, 0, 1, 4
    # squared sum 30, 1 - 180/120 = -0.5.
    expected = (0.8 - 0.9 * 0.5) / math.sqrt((1 - 0.81) * (1 - 0.25))
    assert partial_spearman(a, b, c).value == pytest.approx(expected)


def test_a_common_cause_is_taken_out() -> None:
    rng = np.random.default_rng(0)
    length = rng.normal(size=4000)
    s, hard = length + rng.normal(size=4000), length + rng.normal(size=4000)
    assert spearman(s, hard).low > 0.4
    held = partial_spearman(s, hard, length)
    assert held.low < 0 < held.high


def test_fishers_interval_holds_what_it_promises() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        a, b = rng.normal(size=(2, 50))
        estimate = spearman(a, b)
        inside += estimate.low <= 0 <= estimate.high
    assert 180 <= inside <= 199


def test_intervals() -> None:
    assert student_interval([0.5]) == (0.5, 0.5, 0.5)
    low, high = student_interval([0.4, 0.6])[1:]
    assert high - low == pytest.approx(2 * 12.7062 * 0.1)  # standard error 0.1, one degree of freedom
    assert over_rows(np.array([0.0, 1.0, 0.0, 1.0])).high == pytest.approx(0.5 + 1.96 * math.sqrt(1 / 3 / 4), abs=1e-4)
    gap = difference(np.array([1.0, 3.0]), np.array([0.0, 0.0]))
    assert gap.value == 2
    assert gap.high - gap.value == pytest.approx(1.96, abs=1e-3)


@given(st.lists(st.floats(0, 10), min_size=3, max_size=60))
def test_thirds_are_thirds_and_ordered(values: list[float]) -> None:
    array = np.array(values)
    third = thirds(array)
    sizes = np.bincount(third, minlength=3)
    assert sizes.max() - sizes.min() <= 1
    for lower in (0, 1):
        assert array[third == lower].max() <= array[third == lower + 1].min()
