"""The scorer: order, neighbours, long texts, pairs, tasks, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from budgetformer.data.tokens import TextError
from budgetformer.engine.answers import Columns, named
from budgetformer.engine.scorer import Scorer
from budgetformer.errors import UsageError
from tests.predict.toy import WORDS, make_scorer, tokenizer

TEXTS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=24).map(" ".join), min_size=1, max_size=12)


def alone(scorer: Scorer, text: str, pair: str | None = None, **cut: Any) -> Any:
    """The model on one text, without any of the scorer's machinery."""
    made = tokenizer()(text, pair, return_tensors="pt", truncation=True, max_length=scorer.max_length)
    with torch.inference_mode():
        return scorer.engine.model(**made, budget=scorer.budget)


@pytest.mark.parametrize("config", [{}, {"pool_padding": True}, {"kind": "all"}, {"segment_embeddings": True}])
@given(texts=TEXTS, batch_tokens=st.integers(1, 200))
def test_neighbours_and_batch_size_do_not_matter(config: dict[str, Any], texts: list[str], batch_tokens: int) -> None:
    scorer = _scorers(tuple(config.items()))
    scorer.engine.batch_tokens = batch_tokens
    pairs = texts[::-1] if "segment_embeddings" in config else None
    scores = scorer.score(texts, pairs)
    for row, text in enumerate(texts):
        out = alone(scorer, text, pairs[row] if pairs else None)
        np.testing.assert_allclose(scores.probabilities[row], out.logits.softmax(-1)[0].numpy(), atol=1e-6)
        assert scores.heads[row].tolist() == [int(a.active.sum()) for a in out.allocations]
        assert scores.head_share[row] == pytest.approx(scores.heads[row].mean() / 4)


_MADE: dict[Any, Scorer] = {}


def _scorers(config: tuple[Any, ...]) -> Scorer:
    if config not in _MADE:
        _MADE[config] = make_scorer(config=dict(config))
    return _MADE[config]


@pytest.mark.parametrize(
    ("problem", "function"),
    [
        ("single_label_classification", lambda logits: logits.softmax(-1)),
        ("multi_label_classification", torch.sigmoid),
        ("regression", lambda logits: logits),
    ],
)
def test_every_task_has_its_values(problem: str, function: Any) -> None:
    scorer = make_scorer(config={"problem_type": problem, "kind": "all"})
    scores = scorer.score(["a great story"])
    np.testing.assert_allclose(scores.probabilities, function(alone(scorer, "a great story").logits), atol=1e-6)
    assert scorer.labels == ([] if problem == "regression" else ["neg", "pos", "none"])


def test_no_texts_give_no_scores() -> None:
    scores = make_scorer().score([])
    assert scores.probabilities.shape == (0, 3)
    assert scores.heads.shape == (0, 2)


def test_the_dial_sets_the_heads_and_random_heads_repeat() -> None:
    texts = ["a great story of town", "some awful film"]
    assert make_scorer(budget="fixed:0.5").score(texts).heads.tolist() == [[2, 2], [2, 2]]
    scorer = make_scorer(budget="random")
    before = torch.get_rng_state()
    first, again = scorer.score(texts), scorer.score(texts)
    np.testing.assert_array_equal(first.probabilities, again.probabilities)
    assert torch.equal(before, torch.get_rng_state())


LONG_TEXT = " ".join(WORDS * 3)
FITS = " ".join(WORDS[:4])


def ids(text: str, pair: str | None = None) -> list[int]:
    return list(tokenizer()(text, pair)["input_ids"])


def test_cut_keeps_the_beginning_and_says_so() -> None:
    scores = make_scorer().score([FITS, LONG_TEXT])
    assert scores.table.truncated.tolist() == [False, True]
    assert scores.tokens.tolist() == [len(ids(FITS)), 16]
    exact = " ".join(WORDS[:14])
    assert len(ids(exact)) == 16
    assert not make_scorer().score([exact]).table.truncated[0]


def test_head_tail_keeps_both_ends() -> None:
    encoded = make_scorer(max_length=9, long="head-tail").encode([FITS, LONG_TEXT])
    rows = [encoded.tokens[a:b].tolist() for a, b in zip(*_spans(encoded), strict=True)]
    inner = ids(LONG_TEXT)[1:-1]
    assert rows[0] == ids(FITS)
    assert rows[1] == [ids("")[0], *inner[:4], *inner[-3:], ids("")[-1]]
    assert encoded.truncated.tolist() == [False, True]


def test_head_tail_of_a_pair_holds_for_each_text() -> None:
    first, second = "the film was", LONG_TEXT
    pieces = make_scorer(max_length=12, long="head-tail").encode([first], [second])
    a, b = ids(first)[1:-1], ids(second)[1:-1]
    cls, sep = ids("")
    assert pieces.tokens.tolist() == [cls, *a, sep, *b[:3], *b[-3:], sep]
    assert pieces.pair_start.tolist() == [5]


def _spans(pieces: Any) -> tuple[Any, Any]:
    return pieces.offsets[:-1], pieces.offsets[1:]


def test_windows_read_everything_and_average_by_tokens() -> None:
    scorer = make_scorer(max_length=10, long="windows")
    text = " ".join(WORDS[:15])
    pieces = scorer.encode([FITS, text, FITS])
    inner, (cls, sep) = ids(text)[1:-1], ids("")
    windows = [pieces.tokens[a:b].tolist() for a, b in zip(*_spans(pieces), strict=True)][1:-1]
    assert windows == [[cls, *inner[:8], sep], [cls, *inner[6:14], sep], [cls, *inner[12:], sep]]
    scores = scorer.score([FITS, text, FITS])
    with torch.inference_mode():
        parts = [scorer.engine.model(torch.tensor([w])).logits.softmax(-1)[0].numpy() for w in windows]
    mean = np.average(parts, axis=0, weights=[len(w) for w in windows])
    np.testing.assert_allclose(scores.probabilities[1], mean, atol=1e-6)
    np.testing.assert_allclose(scores.probabilities[0], scores.probabilities[2], atol=1e-6)
    assert scores.table.truncated.tolist() == [False] * 3
    assert scores.tokens.tolist() == [6, sum(map(len, windows)), 6]


@pytest.mark.parametrize(
    ("options", "texts", "pairs", "error", "message"),
    [
        ({"long": "error"}, [FITS, LONG_TEXT], None, TextError, "text 1: has more than the model's 16 tokens"),
        ({"long": "middle"}, [], None, UsageError, "long is 'middle': choose one of cut, head-tail, windows, error"),
        ({"long": "windows"}, [FITS], [FITS], UsageError, "is for single texts"),
        ({}, [FITS], [], UsageError, "1 texts but 0 second texts"),
        ({}, [FITS, 5], None, TextError, "text 1: a int, not a string"),
        ({}, [FITS, "a\ud800"], None, TextError, "text 1: holds half a surrogate pair"),
        ({"budget": "some"}, [], None, UsageError, "budget 'some' is not known"),
    ],
)
def test_errors_name_the_text(options: Any, texts: Any, pairs: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make_scorer(**options).score(texts, pairs)


@pytest.mark.parametrize("long", ["cut", "head-tail", "windows"])
def test_no_texts_have_no_answers(long: str) -> None:
    scorer = make_scorer(long=long)
    scores = scorer.score([])
    assert scores.probabilities.shape == (0, 3)
    assert scores.head_share.shape == scores.tokens.shape == (0,)
    assert list(Columns(scorer.config, scorer.labels).rows(scores)) == []
    assert named(scores.probabilities, "single_label_classification", ["a", "b", "c"]) == []
