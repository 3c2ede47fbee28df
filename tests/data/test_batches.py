"""Every row once an epoch, within the budget, the same for everyone who asks; padding is right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tables import make_table

from budgetformer.data.batches import collate, eval_plan, plan_epoch
from budgetformer.data.tokens import TokenTable
from budgetformer.errors import UsageError

LENGTHS = st.lists(st.integers(1, 64), max_size=300).map(lambda values: np.array(values, np.int64))


@given(lengths=LENGTHS, size=st.integers(1, 70), window=st.integers(1, 200), epoch=st.integers(0, 3))
def test_batches_of_a_fixed_size(lengths: np.ndarray, size: int, window: int, epoch: int) -> None:
    plan = plan_epoch(lengths, batch_size=size, seed=1, epoch=epoch, window=window)
    assert len(plan) == math.ceil(len(lengths) / size)
    assert sorted(np.concatenate([*plan, []]).tolist()) == list(range(len(lengths)))
    assert all(0 < len(rows) <= size for rows in plan)
    again = plan_epoch(lengths, batch_size=size, seed=1, epoch=epoch, window=window)
    assert [rows.tolist() for rows in plan] == [rows.tolist() for rows in again]


@given(lengths=LENGTHS, budget=st.integers(64, 700), window=st.integers(1, 200))
def test_batches_within_a_token_budget(lengths: np.ndarray, budget: int, window: int) -> None:
    for plan in (
        plan_epoch(lengths, token_budget=budget, seed=0, epoch=0, window=window),
        eval_plan(lengths, token_budget=budget),
    ):
        assert sorted(np.concatenate([*plan, []]).tolist()) == list(range(len(lengths)))
        assert all(len(rows) and len(rows) * lengths[rows].max() <= budget for rows in plan)


def test_another_epoch_or_seed_is_another_order() -> None:
    lengths = np.full(100, 7)
    plans = [
        np.concatenate(plan_epoch(lengths, batch_size=8, seed=s, epoch=e)).tolist()
        for s, e in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert len({tuple(plan) for plan in plans}) == 4


def test_rows_of_similar_length_share_a_batch() -> None:
    lengths = np.random.default_rng(0).integers(5, 200, 4000)
    plan = plan_epoch(lengths, batch_size=32, seed=0, epoch=0)
    padded = sum(len(rows) * lengths[rows].max() for rows in plan)
    assert padded / lengths.sum() < 1.05
    firsts = [int(lengths[rows].max()) for rows in plan]
    assert firsts != sorted(firsts)  # but the batches come in any order


def test_many_rows_of_one_length_share_no_batch_with_others() -> None:
    lengths = np.array([9] * 300 + [20] * 150 + [21, 22, 23])
    plan = eval_plan(lengths, token_budget=4096)
    assert [sorted(set(lengths[rows].tolist())) for rows in plan] == [[9], [20], [21, 22, 23]]
    assert len(eval_plan(lengths, token_budget=1024)) > 3


def test_evaluation_goes_from_short_to_long() -> None:
    lengths = np.array([5, 1, 9, 3, 3])
    assert [rows.tolist() for rows in eval_plan(lengths, batch_size=2)] == [[1, 3], [4, 0], [2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either batch_size"),
        ({"batch_size": 4, "token_budget": 64}, "either batch_size"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"token_budget": 8}, "token_budget is 8, but the longest row has 9 tokens"),
    ],
)
def test_impossible_plans_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        eval_plan(np.array([9, 2]), **options)


def encoded(labels: np.ndarray, pair_start: list[int]) -> TokenTable:
    return make_table([2, 7, 3, 2, 8, 9, 3, 5, 3], [3, 6], labels, pair_start)


def test_collate_pads_and_masks() -> None:
    batch = collate(encoded(np.array([1, 0], np.int32), [0, 4]), np.array([1, 0]), pad_id=0)
    assert batch.input_ids.tolist() == [[2, 8, 9, 3, 5, 3], [2, 7, 3, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[True] * 6, [True] * 3 + [False] * 3]
    assert batch.token_type_ids is not None
    assert batch.token_type_ids.tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6]
    assert batch.labels.tolist() == [0, 1]
    tensors = batch.tensors()
    assert list(tensors) == ["input_ids", "attention_mask", "token_type_ids", "labels"]
    assert tensors["input_ids"].dtype == tensors["labels"].dtype == torch.int64
    assert batch.rows.tolist() == [1, 0]


def test_a_batch_is_as_wide_as_its_own_longest_row() -> None:
    batch = collate(encoded(np.array([0.5, 2], np.float32), [0, 0]), np.array([0]), pad_id=9)
    assert batch.input_ids.shape == (1, 3)
    assert batch.token_type_ids is None
    tensors = batch.tensors("cpu")
    assert "token_type_ids" not in tensors
    assert (tensors["labels"].dtype, tensors["labels"].tolist()) == (torch.float32, [0.5])


def test_several_labels_are_floats() -> None:
    batch = collate(encoded(np.array([[1, 0], [1, 1]], np.uint8), [0, 0]), np.array([0, 1]), pad_id=0)
    assert batch.tensors()["labels"].dtype == torch.float32
    assert batch.tensors()["labels"].tolist() == [[1, 0], [1, 1]]
