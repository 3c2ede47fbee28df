"""Splits are disjoint, whole, balanced, repeatable, and share no text."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from budgetformer.data.splits import carve, overlap, pool_rare, quantile_bins, repeats, sample_rows, subset, text_hash

TABLES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), min_size=8, max_size=200)
SEEDS = st.integers(0, 5)


def arrays(table: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([t for t, _ in table], np.uint64), np.array([s for _, s in table], np.int32)


@given(table=TABLES, seed=SEEDS)
def test_rows_with_one_text_stay_together(table: list[tuple[int, int]], seed: int) -> None:
    hashes, strata = arrays(table)
    part = carve(hashes, strata, [0.2, 0.2], seed)
    assert set(part) <= {0, 1, 2}
    for a in range(3):
        for b in range(a):
            assert not np.intersect1d(hashes[part == a], hashes[part == b]).size
    np.testing.assert_array_equal(part, carve(hashes, strata, [0.2, 0.2], seed))


@given(counts=st.lists(st.integers(1, 90), min_size=2, max_size=5), seed=SEEDS)
def test_every_class_has_its_share_and_stays_in_train(counts: list[int], seed: int) -> None:
    strata = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    hashes = np.arange(len(strata), dtype=np.uint64)
    part = carve(hashes, strata, [0.1, 0.1], seed)
    for number in (1, 2):
        spare = len(strata) - len(counts)
        size = max(1, round(0.1 * len(strata)))
        assert np.sum(part == number) <= size
        if spare >= 2 * size:
            assert np.sum(part == number) == size
    for stratum, count in enumerate(counts):
        parts = part[strata == stratum]
        assert np.any(parts == 0)
        for number in (1, 2):
            assert abs(np.sum(parts == number) - 0.1 * count) <= 2 + 0.02 * count


def test_another_seed_is_another_split() -> None:
    hashes, strata = np.arange(200, dtype=np.uint64), np.zeros(200, np.int32)
    assert np.any(carve(hashes, strata, [0.1], 0) != carve(hashes, strata, [0.1], 1))


def test_a_fraction_of_nothing_is_an_empty_part() -> None:
    part = carve(np.arange(50, dtype=np.uint64), np.zeros(50, np.int32), [0.1, 0.0], 0)
    assert np.bincount(part, minlength=3).tolist() == [45, 5, 0]


@given(total=st.integers(0, 300), n=st.integers(0, 300))
def test_evenly_spaced_positions_are_distinct(total: int, n: int) -> None:
    picked = sample_rows(total, n)
    assert len(set(picked)) == len(picked) == min(total, n)
    assert all(0 <= p < total for p in picked)


def test_a_subset_keeps_the_balance() -> None:
    strata = np.repeat(np.array([0, 1], np.int32), [900, 100])
    rows = subset(strata, 100, seed=3)
    assert len(set(rows)) == 100
    assert abs(np.sum(strata[rows] == 1) - 10) <= 1
    np.testing.assert_array_equal(rows, subset(strata, 100, seed=3))
    np.testing.assert_array_equal(subset(strata, 5000, seed=3), np.arange(1000))


def test_equal_up_to_case_and_space_is_equal() -> None:
    assert text_hash("Hello  World\n", None) == text_hash("hello world", None)
    assert text_hash("a", "b") != text_hash("a b", None)
    assert text_hash("a", "b") != text_hash("b", "a")


def test_repeats_and_overlap() -> None:
    a = np.array([1, 1, 2, 5, 5, 5], np.uint64)
    assert repeats(a) == 3
    assert overlap(np.array([0, 2, 5, 9], np.uint64), a).tolist() == [False, True, True, False]
    assert overlap(a, np.zeros(0, np.uint64)).sum() == 0


def test_strata_of_numbers_and_of_rare_combinations() -> None:
    bins = quantile_bins(np.arange(100, dtype=np.float64))
    assert np.bincount(bins).tolist() == [10] * 10
    assert pool_rare(np.array([0, 0, 1, 2, 2, 3], np.int32)).tolist() == [0, 0, -1, 2, 2, -1]
