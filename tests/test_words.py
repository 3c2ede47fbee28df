"""Stage 0: hashed n-grams, tf-idf and a linear model, against values worked out by hand and against scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetformer import words as words_module
from budgetformer.data.tokens import TokenTable
from budgetformer.words import SCALE, Words, features, fit_strength, fit_words

SINGLE, MULTI = "single_label_classification", "multi_label_classification"


def table(rows: list[list[int]], starts: list[int] | None = None) -> TokenTable:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    tokens = np.array([token for row in rows for token in row], np.int32)
    places = np.arange(len(rows))
    return TokenTable(
        tokens, offsets, np.array(starts or [0] * len(rows), np.int32), starts is not None, places, places > len(rows)
    )


def topics(rows: int, seed: int = 0) -> tuple[TokenTable, Any]:
    """Texts of two kinds, told apart by a few of their words."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows).astype(np.int32)
    texts = [[*rng.integers(100, 200, 8), *rng.integers(10 + 5 * y, 15 + 5 * y, 2)] for y in labels]
    return table([list(map(int, text)) for text in texts]), labels


def test_many_labels_are_penalised_less() -> None:
    assert [fit_strength(labels, SINGLE) for labels in (2, 5, 10, 14, 150)] == pytest.approx([8, 8, 32, 62.72, 64])
    assert fit_strength(150, MULTI) == 8  # there each label is a question of its own


def test_a_row_has_each_distinct_uni_and_bigram_once() -> None:
    starts, columns, counts = features(*parts(table([[7, 8, 7, 8], [7]])), 1 << 16)
    assert starts.tolist() == [0, 4]  # 7, 8, 7-8, 8-7; and 7
    assert sorted(counts[:4].tolist()) == [1, 2, 2, 2]
    assert columns[4] in columns[:4]  # a word is the same in every row
    assert counts[4:].tolist() == [1]


def parts(t: TokenTable) -> tuple[Any, Any, Any]:
    return t.tokens, t.offsets, t.pair_start


def test_bigrams_are_ordered_and_do_not_cross_rows() -> None:
    _, forth, _ = features(*parts(table([[7, 8]])), 1 << 16)
    _, back, _ = features(*parts(table([[8, 7]])), 1 << 16)
    assert len(set(forth) & set(back)) == 2  # the words, not their order
    _, split, _ = features(*parts(table([[7], [8]])), 1 << 16)
    assert len(split) == 2


def test_words_of_a_second_text_and_words_of_both_are_told_apart() -> None:
    def last(row: list[int], start: int) -> set[int]:
        return set(features(*parts(table([row], [start])), 1 << 20)[1].tolist())

    single, second, shared = last([7, 9], 0), last([7, 9], 1), last([9, 9], 1)
    assert single != second
    assert len(second - single) == 2  # the second word and the pair
    assert not (shared - last([9], 0)) & second  # 9 after 9 is not 9 after 7


def test_logits_are_the_hand_computed_ones() -> None:
    buckets = 1 << 10
    starts, columns, _ = features(*parts(table([[3, 3]])), buckets)
    assert len(starts) == 1
    idf, weights = np.ones(buckets, np.float32), np.zeros((buckets, 2), np.float32)
    word = features(*parts(table([[3]])), buckets)[1][0]
    pair = next(c for c in columns if c != word)
    idf[word], idf[pair] = 2.0, 3.0
    weights[word], weights[pair] = (1.0, 0.0), (0.0, 5.0)
    values = {word: (1 + math.log(2)) * 2.0, pair: 3.0}  # the word occurs twice, the pair once
    length = math.hypot(*values.values())
    logits = Words(idf, weights, np.array([0.5, 0.0], np.float32)).logits(table([[3, 3]]))
    assert logits[0] == pytest.approx([values[word] / length + 0.5, 5 * values[pair] / length], rel=1e-6)


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=12), min_size=1, max_size=8), st.data())
def test_a_row_gets_the_same_logits_in_any_company(rows: list[list[int]], data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    model = Words(
        rng.random(256, np.float32) + 1, rng.standard_normal((256, 3)).astype(np.float32), np.zeros(3, np.float32)
    )
    together = model.logits(table(rows))
    row = data.draw(st.integers(0, len(rows) - 1))
    assert np.array_equal(model.logits(table([rows[row]]))[0], together[row])


def test_it_learns_what_words_tell() -> None:
    train, labels = topics(400)
    held_out, answers = topics(400, seed=1)
    model = fit_words(train, labels, 2, SINGLE, bits=14)
    assert (model.logits(held_out).argmax(1) == answers).mean() > 0.95


def test_it_is_scikit_learns_logistic_regression_with_the_root_of_naive_bayes() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import normalize

    train, labels = topics(100)
    model = fit_words(train, labels, 2, SINGLE, bits=12)
    starts, columns, counts = features(*parts(train), 1 << 12)
    dense = np.zeros((100, 1 << 12), np.float32)
    dense[np.repeat(np.arange(100), np.diff([*starts, len(columns)])), columns] = 1 + np.log(counts)
    rows_with = (dense > 0).sum(0)
    dense = normalize(dense * np.where(rows_with > 1, np.log(101 / (1 + rows_with)) + 1, 0))
    one, other = ((dense[labels == label] > 0).sum(0)[rows_with > 1] + 1 for label in (0, 1))
    odds = np.abs(np.log(one / one.sum() / (other / other.sum())))
    dense[:, rows_with > 1] *= np.sqrt(odds / odds.mean())
    theirs = LogisticRegression(C=8, max_iter=200).fit(dense, labels).decision_function(dense)
    assert np.diff(model.logits(train))[:, 0] == pytest.approx(SCALE * theirs, abs=1e-2)


def test_what_only_one_row_has_does_not_count() -> None:
    model = fit_words(table([[7, 8], [7, 9], [7, 9]]), np.array([0, 1, 1], np.int32), 2, SINGLE, bits=16)
    seven, eight, nine = (features(*parts(table([[token]])), 1 << 16)[1][0] for token in (7, 8, 9))
    assert model.idf[seven] == pytest.approx(1)
    assert model.idf[nine] == pytest.approx(math.log(4 / 3) + 1)
    assert model.idf[eight] == 0


def test_naive_bayes_counts_only_labels_that_there_are() -> None:
    train, labels = topics(100)
    two, four = (fit_words(train, labels, outputs, SINGLE, bits=12) for outputs in (2, 4))
    assert np.array_equal(two.weights, four.weights[:, :2])


def test_rows_that_share_nothing_teach_only_how_frequent_classes_are() -> None:
    model = fit_words(table([[1], [2], [3]]), np.array([0, 1, 1], np.int32), 2, SINGLE, bits=16)
    assert set(model.logits(table([[1], [9]])).argmax(1)) == {1}


def test_several_labels_numbers_missing_classes_and_single_classes() -> None:
    train, labels = topics(120)
    both = np.stack([labels, 1 - labels, np.ones_like(labels)], axis=1).astype(np.uint8)
    logits = fit_words(train, both, 3, MULTI, bits=12).logits(train)
    assert ((logits > 0) == both).mean() > 0.95
    numbers = fit_words(train, labels.astype(np.float32), 1, "regression", bits=12).logits(train)[:, 0]
    assert np.corrcoef(numbers, labels)[0, 1] > 0.95
    absent = fit_words(train, labels, 4, SINGLE, bits=12).logits(train)
    assert set(absent.argmax(1)) == {0, 1}
    only = fit_words(train, np.ones_like(labels), 3, SINGLE, bits=12).logits(train)
    assert set(only.argmax(1)) == {1}


@pytest.mark.parametrize("task", [SINGLE, MULTI, "regression"])
def test_more_rows_than_memory_holds_are_learned_from_in_chunks(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels = topics(2000)
    targets = {MULTI: np.stack([labels, 1 - labels], axis=1), "regression": labels.astype(np.float32)}.get(task, labels)
    outputs = 1 if task == "regression" else 2
    monkeypatch.setattr(words_module, "_IN_MEMORY", 5000)
    logits = fit_words(train, targets, outputs, task, bits=12).logits(train)
    if task == "regression":
        assert np.corrcoef(logits[:, 0], labels)[0, 1] > 0.8
    else:
        right = (logits > 0) == targets if task == MULTI else logits.argmax(1) == labels
        assert right.mean() > 0.95


def test_many_tokens_are_hashed_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels = topics(50)
    model = fit_words(train, labels, 2, SINGLE, bits=12)
    at_once = model.logits(train)
    monkeypatch.setattr(words_module, "_CHUNK", 30)
    assert np.array_equal(model.logits(train), at_once)
