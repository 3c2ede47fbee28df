"""The exit rule: margins, P(disagree), who leaves, and what a budget means."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from budgetformer.dial import Dial
from budgetformer.exits import ExitOptions, Exits, default_layers, fit_rule, margin, mix_words, same_answer

SINGLE, MULTI = "single_label_classification", "multi_label_classification"


def exits(**options: object) -> Exits:
    return Exits(ExitOptions(**{"layers": [2, 4], "rule": [[0, -1]] * 3, **options}), 6, SINGLE)  # type: ignore[arg-type]


def test_stages_are_words_exits_and_the_last_layer() -> None:
    with_words, without = exits(), exits(words=False)
    assert with_words.names == ["words", "layer 2", "layer 4", "layer 6"]
    assert (with_words.depths, with_words.heads) == ([0, 2, 4, 6], [0, 1, 2, 2])
    assert (without.depths, without.heads) == ([2, 4, 6], [1, 2, 2])
    assert [default_layers(n) for n in (1, 2, 3, 4, 6, 12)] == [[], [1], [1], [1, 3], [2, 4], [4, 8]]


def test_a_margin_is_the_gap_to_the_nearest_other_answer() -> None:
    assert margin(np.array([[3.0, 1.0, -5.0], [0.0, 0.0, -1.0]]), SINGLE).tolist() == [2.0, 0.0]
    assert margin(np.array([[3.0, -0.5, -5.0]]), MULTI).tolist() == [0.5]
    assert same_answer(np.array([[1.0, -1.0]]), np.array([[2.0, 1.0]]), SINGLE).tolist() == [True]
    assert same_answer(np.array([[1.0, -1.0]]), np.array([[2.0, 1.0]]), MULTI).tolist() == [False]


def test_a_row_leaves_where_the_risk_is_below_the_limit_times_what_is_still_to_come() -> None:
    rule = exits()
    logits = np.array([[2.0, 0.0]])  # a margin of 2: a risk of 1 / (1 + e^2) = 0.119
    risk = 1 / (1 + math.exp(2))
    assert rule.risk(0, logits) == pytest.approx([risk])
    for stage, to_come in ((0, 1.0), (1, 4 / 6), (2, 2 / 6)):
        assert rule.leaves(stage, logits, 1.001 * risk / to_come).tolist() == [True]
        assert rule.leaves(stage, logits, 0.999 * risk / to_come).tolist() == [False]
    assert rule.leaves(3, logits, 0.0).tolist() == [True]


@given(arrays(np.float32, (7, 4, 3), elements=st.floats(-9, 9, width=32)), st.floats(1e-6, 100), st.floats(1, 10))
def test_a_higher_limit_never_sends_a_row_further(logits: np.ndarray, limit: float, factor: float) -> None:
    rule = exits()
    safe, fast = rule.leave(logits, limit), rule.leave(logits, factor * limit)
    assert (fast <= safe).all()
    assert (rule.leave(logits, 0.0) == 3).all()
    assert (rule.leave(logits, math.inf) == 0).all()


def test_the_fitted_risk_is_the_share_of_rows_that_change() -> None:
    rng = np.random.default_rng(0)
    early = np.zeros((20_000, 2))
    early[:, 0] = rng.exponential(3, len(early))
    risk = 1 / (1 + np.exp(0.5 + 0.8 * early[:, 0]))
    last = np.where((rng.random(len(early)) < risk)[:, None], early[:, ::-1] + [0, 0.1], early)
    ((intercept, slope),) = fit_rule(np.stack([early, last], axis=1), SINGLE)
    assert (intercept, slope) == pytest.approx((-0.5, -0.8), abs=0.1)


def test_a_rule_from_few_rows_that_never_change_is_not_certain() -> None:
    logits = np.random.default_rng(0).normal(size=(20, 1, 3)).repeat(2, axis=1)
    rule = fit_rule(logits, SINGLE)
    risk = Exits(ExitOptions(layers=[], rule=rule), 2, SINGLE).risk(0, logits[:, 0])
    assert (risk > 1e-4).all()
    assert (risk < 0.5).all()


def test_more_margin_is_never_more_risk() -> None:
    logits = np.zeros((100, 2, 2))
    logits[:, 0, 0] = np.linspace(0, 5, 100)
    logits[:, 1, 1] = np.linspace(-1, 1, 100)  # the surer it is, the more often it changes
    ((_, slope),) = fit_rule(logits, SINGLE)
    assert slope == 0


def test_a_budget_is_a_limit_on_the_curve() -> None:
    rule = exits(curve=[(0.1, 1.0), (0.3, 0.1), (0.9, 0.001), (1.01, 0.0)], limit=0.02)
    assert rule.limit(Dial("full")) == 0
    assert rule.limit(Dial("learned")) == 0.02
    assert rule.limit(Dial("exit", 0.5)) == 0.5
    assert rule.limit(Dial("share", 0.3)) == pytest.approx(0.1)
    assert rule.limit(Dial("share", 0.2)) == pytest.approx(math.sqrt(0.1))
    assert rule.limit(Dial("share", 0.95)) == 0.001  # never more than was asked for
    assert exits(curve=[(0.1, 1.0), (0.7, 0.0)]).limit(Dial("share", 0.8)) == 0
    assert rule.limit(Dial("share", 0.05)) == math.inf
    assert rule.limit(Dial("max", 0.5)) == 0  # the paper's dials turn heads


@pytest.mark.parametrize("text", ["0.3", "0", "1", "exit:0.001", "exit:inf", "exit:12"])
def test_budgets_of_depth_read_back_as_they_are_written(text: str) -> None:
    assert str(Dial.parse(text)) == text
    assert Dial.parse(text).heads == Dial("learned")
    assert Dial.parse(0.3) == Dial("share", 0.3)


@pytest.mark.parametrize("task", [SINGLE, MULTI, "regression"])
def test_words_are_added_where_they_help_and_layers_that_are_noise_are_left_out(task: str) -> None:
    """Labels are the sum of what the words and the last layers say; the layers before say nothing."""
    rng = np.random.default_rng(0)
    words, noise, layers = rng.standard_normal((3, 2000, 1 if task == "regression" else 3))
    truth = 2 * words + 4 * layers
    labels = {SINGLE: truth.argmax(1), MULTI: (truth > 0).astype(int), "regression": truth[:, 0]}[task]
    shares, logits = mix_words(np.stack([words, noise, layers], axis=1), labels, task)
    assert shares[0, 0] < 0.1 * shares[0, 1]
    assert shares[1, 0] == pytest.approx(2 * shares[1, 1], rel=0.1)
    mixed = [words, *(a * own + b * words for own, (a, b) in zip((noise, layers), shares, strict=True))]
    assert logits == pytest.approx(np.stack(mixed, axis=1))


def test_a_stage_is_never_without_an_answer() -> None:
    """Nothing that helps: the layers' answer stays."""
    labels, wrong = np.array([0, 1] * 50), np.array([[0.0, 1.0], [1.0, 0.0]] * 50)
    shares, _ = mix_words(np.stack([wrong, wrong], axis=1), labels, SINGLE)
    assert shares.tolist() == [[1.0, 0.0]]
