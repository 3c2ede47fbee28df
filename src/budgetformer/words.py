"""Stage 0: a linear classifier over hashed n-grams of the word pieces that are tokenised anyway.

Uni- and bigrams of token ids, tf-idf, and logistic regression that trusts an n-gram more if labels differ in it. A
single text is read to its end, past the length at which layers stop, because it costs next to nothing. Only
numpy is needed to answer; scikit-learn to fit.
Shapes: R rows, F features of a table (one for each distinct n-gram of each row), V hash buckets, C outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.tokens import TokenTable

Floats = NDArray[np.float32]
Ints = NDArray[Any]

REGRESSION, MULTI = "regression", "multi_label_classification"
SCALE = 0.7  # of the logits: they are a part of an answer that layers correct
_SECOND, _SHARED = 1 << 20, 1 << 21  # added to a token of a pair's second text; and where the first text has it too
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: the high bits of the product are spread evenly
_CHUNK = 1 << 20  # tokens that are hashed at a time
_IN_MEMORY = 1 << 25  # tokens of a chunk whose n-grams are held in memory
_PASSES = 3  # over the chunks
_TINY = np.finfo(np.float32).tiny
_LEAST_ROWS = 2  # that have an n-gram which counts


class Tokens(Protocol):
    """Texts in token ids; a TokenTable is one. Row i is `tokens[offsets[i]:offsets[i + 1]]`."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def offsets(self) -> NDArray[np.int64]: ...
    @property
    def pair_start(self) -> NDArray[np.int32]: ...


@dataclass(frozen=True, eq=False)
class Words:
    """A fitted linear model: logits = (tf-idf of hashed n-grams, at length 1) @ weights + bias."""

    idf: Floats  # (V,)
    weights: Floats  # (V, C)
    bias: Floats  # (C,)

    def logits(self, table: Tokens) -> Floats:
        """What the words of each row say, cut or not, the same whatever other rows there are. -> (R, C)."""
        parts = [self._logits(*part) for part in _chunks(table)]
        return np.concatenate(parts) if parts else np.zeros((0, len(self.bias)), np.float32)

    def _logits(self, tokens: Ints, offsets: Ints, pair_start: Ints) -> Floats:
        starts, columns, counts = features(tokens, offsets, pair_start, len(self.idf))
        values = _frequency(counts) * self.idf[columns]
        sums = np.add.reduceat(values[:, None] * self.weights[columns], starts)
        length = np.sqrt(np.add.reduceat(values * values, starts))[:, None]
        return (sums / np.maximum(length, _TINY) + self.bias).astype(np.float32)


def features(tokens: Ints, offsets: Ints, pair_start: Ints, buckets: int) -> tuple[Ints, Ints, Ints]:
    """The distinct n-grams of each row -> where each row's begin (R,), their buckets (F,), how often they occur (F,).

    Tokens of a second text are others than those of the first, and so are those of it that both texts have.
    """
    lengths = offsets[1:] - offsets[:-1]
    rows = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    ids = tokens.astype(np.int64)
    if pair_start.any():
        place = np.arange(len(ids)) - np.repeat(offsets[:-1] - offsets[0], lengths)
        start = np.repeat(pair_start.astype(np.int64), lengths)
        second = (start > 0) & (place >= start)
        keys = rows << 20 | ids
        first = np.sort(keys[~second])
        nearest = first[np.minimum(first.searchsorted(keys), len(first) - 1)]
        ids = ids + _SECOND * second + _SHARED * (second & (nearest == keys))
    follows = np.flatnonzero(rows[1:] == rows[:-1])  # a bigram does not cross from row to row
    grams = np.concatenate([ids, (ids[follows] + 1) << 32 | ids[follows + 1]]).astype(np.uint64)
    shift = np.uint64(64 - int(buckets).bit_length() + 1)
    hashed = ((grams + np.uint64(1)) * _MULTIPLIER >> shift).astype(np.int64)
    keys = np.concatenate([rows, rows[follows]]) * buckets + hashed
    keys.sort()
    places = np.concatenate([[0], (keys[1:] != keys[:-1]).nonzero()[0] + 1, [len(keys)]])  # of the distinct ones
    keys, counts = keys[places[:-1]], places[1:] - places[:-1]
    return keys.searchsorted(np.arange(len(lengths)) * buckets), keys % buckets, counts


def fit_strength(outputs: int, task: str) -> float:
    """C of the fit: best or near it on news, reviews and pairs; one label of many has fewer rows, and needs more."""
    if task == REGRESSION:
        return 16.0
    return 8.0 if task == MULTI else min(64.0, 8.0 * max(1.0, outputs / 5) ** 2)


def fit_words(table: TokenTable, labels: NDArray[Any], outputs: int, task: str, *, bits: int = 18) -> Words:
    """Fit to labelled rows.

    Above so many tokens the rows are not held in memory at once: averaged stochastic gradient descent over chunks.
    """
    buckets, rows, strength = 1 << bits, len(table), fit_strength(outputs, task)
    size = len(table.tokens) + (0 if table.rest is None else len(table.rest))
    chunks = np.array_split(np.arange(rows), max(1, math.ceil(size / _IN_MEMORY)))
    first = _counts(table if len(chunks) == 1 else table.select(chunks[0]), buckets)
    rows_with = _rows_with(first, labels[chunks[0]], outputs, task)
    for chunk in chunks[1:]:
        rows_with = rows_with + _rows_with(_counts(table.select(chunk), buckets), labels[chunk], outputs, task)
    every = _dense_row(rows_with, -1)
    idf = (np.log((1 + rows) / (1 + every)) + 1).astype(np.float32)
    idf[every < min(_LEAST_ROWS, rows)] = 0  # what one row has, it teaches only about itself
    trust = _trust(rows_with, idf > 0)
    if len(chunks) == 1:
        weights, bias = _solve(_weighted(first, idf, trust), labels, outputs, task, strength)
    else:
        parts = ((_weighted(_counts(table.select(c), buckets), idf, trust), labels[c])
                 for _ in range(_PASSES) for c in chunks)  # fmt: skip
        weights, bias = _stream(parts, np.unique(labels), buckets, outputs, task, 1 / (strength * rows))
    weights *= trust[:, None]
    return Words(idf, SCALE * weights, SCALE * bias) if task != REGRESSION else Words(idf, weights, bias)


def _chunks(table: Tokens) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Tokens, offsets and pair starts of consecutive rows, with what was cut from them."""
    table = table.untruncated() if isinstance(table, TokenTable) else table
    offsets, first = table.offsets, 0
    while first < len(offsets) - 1:
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + _CHUNK, side="right")) - 1)
        part = offsets[first : last + 1]
        yield table.tokens[part[0] : part[-1]], part, table.pair_start[first:last]
        first = last


def _frequency(counts: Ints) -> Floats:
    return (1 + np.log(counts)).astype(np.float32)


def _counts(table: Tokens, buckets: int) -> Any:
    """(R, V) sparse, with the dampened frequency of each n-gram."""
    from scipy.sparse import csr_matrix, vstack

    parts = []
    for tokens, offsets, pair_start in _chunks(table):
        starts, columns, counts = features(tokens, offsets, pair_start, buckets)
        parts.append(csr_matrix((_frequency(counts), columns, np.append(starts, len(columns))),
                                shape=(len(starts), buckets)))  # fmt: skip
    return vstack(parts, format="csr")


def _rows_with(counts: Any, labels: NDArray[Any], outputs: int, task: str) -> Any:
    """How many rows of each label (regression has none), and at the end of all, have an n-gram -> (C + 1, V) sparse."""
    from scipy.sparse import csr_matrix, vstack

    rows = counts.shape[0]
    parts = [csr_matrix(np.ones((1, rows)))]
    if task == MULTI:
        parts.insert(0, csr_matrix(labels.T))
    elif task != REGRESSION:
        parts.insert(0, csr_matrix((np.ones(rows), (labels, np.arange(rows))), shape=(outputs, rows)))
    return vstack(parts, format="csr") @ (counts > 0)


def _dense_row(matrix: Any, row: int) -> Floats:
    return np.asarray(matrix[row].todense()).ravel()


def _trust(rows_with: Any, used: NDArray[np.bool_]) -> Floats:
    """What n-grams are multiplied by in the fit, so that its penalty weighs less on those that tell labels apart.

    The root of their naive Bayes log-odds (Wang and Manning 2012, who take it whole; the root is better on reviews),
    over labels in the mean square; the mean square of all n-grams is 1.
    """
    total, squares, labels = _dense_row(rows_with, -1)[used], np.zeros(int(used.sum())), 0
    for label in range(rows_with.shape[0] - 1):  # one at a time: there may be many
        if (inside := _dense_row(rows_with, label)[used]).any():
            with_label, without = inside + 1, total - inside + 1
            squares += (np.log(with_label / with_label.sum()) - np.log(without / without.sum())) ** 2
            labels += 1
    odds = np.sqrt(squares / labels) if labels else np.ones(len(total))
    trust = np.ones(len(used), np.float32)
    trust[used] = np.sqrt(odds / max(odds.mean(), _TINY)) if len(odds) else 1
    return trust


def _weighted(counts: Any, idf: Floats, trust: Floats) -> Any:
    """Frequencies times idf, each row at length 1, times trust."""
    from sklearn.preprocessing import normalize

    matrix = counts.copy()
    matrix.data *= idf[matrix.indices]
    matrix.eliminate_zeros()
    normalize(matrix, copy=False)
    matrix.data *= trust[matrix.indices]
    return matrix


def _solve(matrix: Any, labels: NDArray[Any], outputs: int, task: str, strength: float) -> tuple[Floats, Floats]:
    """Weights (V, C) and bias (C,), from the columns that have something."""
    from sklearn.linear_model import LogisticRegression, Ridge

    places = np.unique(matrix.indices) if matrix.nnz else np.zeros(1, int)
    every, matrix = np.zeros((matrix.shape[1], outputs), np.float32), matrix[:, places]
    weights, bias = np.zeros((len(places), outputs), np.float32), np.zeros(outputs, np.float32)
    if task == REGRESSION:
        model = Ridge(alpha=1 / strength, solver="sparse_cg", tol=1e-4).fit(matrix, labels)
        every[places, 0], bias[0] = model.coef_.ravel(), float(model.intercept_)
        return every, bias
    multi = task == MULTI
    columns = [labels[:, c] for c in range(outputs)] if multi else [labels]
    for number, column in enumerate(columns):
        present = np.unique(column)
        if len(present) == 1:  # nothing to tell apart
            bias[number if multi else present[0]] = np.log(len(column) + 1) * (1 if not multi or present[0] else -1)
            continue
        model = LogisticRegression(C=strength, max_iter=200).fit(matrix, column)
        if multi:
            weights[:, number], bias[number] = model.coef_[0], model.intercept_[0]
        else:
            _place(weights, bias, model, present)
    every[places] = weights
    return every, bias


def _stream(
    parts: Iterator[tuple[Any, Ints]], classes: Ints, buckets: int, outputs: int, task: str, alpha: float
) -> tuple[Floats, Floats]:
    """As `_solve`, from one part of the rows after the other."""
    from sklearn.linear_model import SGDClassifier, SGDRegressor

    weights, bias = np.zeros((buckets, outputs), np.float32), np.zeros(outputs, np.float32)
    options: dict[str, Any] = {"alpha": alpha, "average": True, "random_state": 0}
    if task == REGRESSION:
        models = [SGDRegressor(**options)]
    else:
        models = [SGDClassifier(loss="log_loss", **options) for _ in range(outputs if task == MULTI else 1)]
    for matrix, labels in parts:
        for number, model in enumerate(models):
            known = {} if task == REGRESSION else {"classes": np.array([0, 1]) if task == MULTI else classes}
            model.partial_fit(matrix, labels[:, number] if task == MULTI else labels, **known)
    if task in (MULTI, REGRESSION):
        for number, model in enumerate(models):
            weights[:, number], bias[number] = model.coef_.ravel(), float(model.intercept_[0])
    else:
        _place(weights, bias, models[0], classes)
    return weights, bias


def _place(weights: Floats, bias: Floats, model: Any, present: NDArray[Any]) -> None:
    """Put the coefficients of the classes that there were into their columns; the others get the bias of rare ones."""
    if len(present) == 2:  # scikit-learn gives one column: half of it for the one class, against the other
        for sign, label in ((-0.5, present[0]), (0.5, present[1])):
            weights[:, label], bias[label] = sign * model.coef_[0], sign * model.intercept_[0]
    else:
        weights[:, present], bias[present] = model.coef_.T, model.intercept_
    absent = np.setdiff1d(np.arange(len(bias)), present)
    bias[absent] = bias[present].min() - 10
