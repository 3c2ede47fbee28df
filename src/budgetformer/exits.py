"""How far a text goes: exits between layers that each answer, helped by the words, and the rule for who leaves.

A model with exits has stages: `words` (a linear model over n-grams, stage 0 where it is there), one after each chosen
layer, and the last layer. A text leaves at the first stage whose answer is trusted: where P(this answer differs from
the last stage's) is below the limit times the share of layers still to come. One limit serves all stages: 0 sends every
text to the end, infinity lets all leave at once. The definition is `leave`, on the logits of all stages.

Shapes: R rows, S stages, C outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetformer.dial import Dial
from budgetformer.errors import UsageError

Floats = NDArray[np.float32]
MULTI, REGRESSION = "multi_label_classification", "regression"
DISAGREEMENT = 0.005  # with the last stage, that the budget `learned` aims at on held-out rows
LIMITS = [float(f"{x:.3g}") for x in np.geomspace(1e-6, 1e2, 161)]  # that a curve is made of, from safe to fast


@dataclass(frozen=True)
class ExitOptions:
    """Where a model has exits, how they are trained, and the rule that was fitted to held-out rows."""

    layers: Sequence[int] | None = None  # after how many layers an exit stands; None: one or two, by depth
    words: bool = True  # whether there is a stage of words
    word_bits: int = 18  # n-grams are hashed into 2^bits buckets
    weight: float = 1.0  # of the exits' losses
    start: float = 0.0  # the progress before which they count nothing: the model is trained dense first
    words_shares: Sequence[float] = ()  # per stage after the words: how much of their logits its answer includes
    rule: Sequence[Sequence[float]] = ()  # per stage but the last: intercept and slope of the margin
    curve: Sequence[Sequence[float]] = ()  # (mean share of the dense cost, limit), ascending by cost, the last limit 0
    limit: float = 0.0  # of the budget `learned`

    def __post_init__(self) -> None:
        if not 8 <= self.word_bits <= 24:
            raise UsageError(f"exits.word_bits={self.word_bits}: give a whole number from 8 to 24")
        if not 0 <= self.start < 1 or self.weight < 0:
            raise UsageError(
                f"exits.start={self.start}, exits.weight={self.weight}: give a progress in [0, 1) and a weight that is "
                "not negative"
            )


def default_layers(layers: int) -> list[int]:
    """Exits for a model of this depth: none in one layer, one in two or three, else two, at thirds."""
    if layers < 4:
        return [1] if layers > 1 else []
    return [round(layers / 3), round(2 * layers / 3)]


def complete_exits(table: Mapping[str, Any] | None, layers: int, task: str) -> dict[str, Any] | None:
    """The config's table of exits with every option; None where the model has neither exits nor words.

    A regression has no exits, only words: a number has no margin that says how sure it is.
    """
    if table is None:
        return None
    known = {f.name for f in fields(ExitOptions)}
    if unknown := sorted(table.keys() - known):
        raise UsageError(f"exits.{unknown[0]} is not known: give one of {', '.join(sorted(known))}")
    options = ExitOptions(**table)
    places = default_layers(layers) if options.layers is None else list(options.layers)
    if wrong := [place for place in places if type(place) is not int or not 1 <= place < layers]:
        raise UsageError(
            f"exits.layers={places}: no text can leave after layer {wrong[0]}; the model has {layers} layers, so give "
            f"numbers from 1 to {layers - 1}"
        )
    if places != sorted(set(places)):
        raise UsageError(f"exits.layers={places}: give each layer once, in ascending order")
    places = [] if task == REGRESSION else places
    if not places and not options.words:
        return None
    return {**{f.name: getattr(options, f.name) for f in fields(options)}, "layers": places}


class StageResult(NamedTuple):
    """What a batch has come to after a stage that is not the last: the rows that came so far, b of them."""

    stage: int
    rows: NDArray[np.int64]  # (b,) their places in the batch
    logits: Floats  # (b, C) not yet divided by the temperature
    heads: NDArray[np.int16]  # (b, l) that ran in the layers so far
    leaves: NDArray[np.bool_]  # (b,) by the rule


AfterStage = Callable[[StageResult], NDArray[np.bool_]]  # gets every stage's result but the last's, returns who leaves


class Exits:
    """The stages of a model and the rule between them: `depths` in layers and `heads` of exits, by stage."""

    def __init__(self, options: ExitOptions, layers: int, task: str, temperatures: Sequence[float] = ()) -> None:
        self.options, self.task = options, task
        self.depths = [*([0] if options.words else []), *(options.layers or ()), layers]
        self.temperatures = np.array(temperatures or [1] * len(self.depths), np.float32)
        self.names = ["words" if depth == 0 else f"layer {depth}" for depth in self.depths]
        self.heads = [min(stage + (not options.words), len(options.layers or ())) for stage in range(len(self.depths))]
        self.closed: set[int] = set()  # stages that nothing leaves at
        self.to_come = 1 - np.array(self.depths) / layers

    @property
    def words(self) -> bool:
        """Whether stage 0 is the words."""
        return self.options.words

    def add_words(self, stage: int, logits: Any, words: Any) -> Any:
        """A later stage's answer: what its layers say and a share of what the words say, both arrays or tensors."""
        shares = self.options.words_shares
        return logits if words is None or not shares else logits + shares[stage - 1] * words

    def limit(self, dial: Dial) -> float:
        """The limit that a budget means; the paper's dials turn heads and leave the depth alone."""
        options = self.options
        if dial.mode == "exit":
            return float(dial.value or 0)
        if dial.mode == "learned":
            return options.limit
        if dial.mode != "share":
            return 0.0
        if not options.curve:
            raise UsageError(f"budget {dial}: no exit rule has been fitted to this model; calibrate it, or give full")
        costs, limits = np.array(options.curve, float).T
        assert dial.value is not None
        if dial.value < costs[0]:
            return math.inf
        place = int(np.searchsorted(costs, dial.value, side="right")) - 1
        if place >= len(costs) - 2:  # the whole model where it is paid for, else the nearest limit that is
            return float(limits[place])
        return float(np.exp(np.interp(dial.value, costs[:-1], np.log(limits[:-1]))))

    def without(self, stage: int) -> Exits:
        """The same stages and rule, but no row leaves at this one."""
        other = copy.copy(self)
        other.closed = {*self.closed, stage}
        return other

    def risk(self, stage: int, logits: NDArray[Any]) -> NDArray[np.float64]:
        """P(the last stage answers differently) after a stage. (R, C) -> (R,)."""
        intercept, slope = self.options.rule[stage]
        return 1 / (1 + np.exp(np.clip(-intercept - slope * margin(logits, self.task), -50, 50)))

    def leaves(self, stage: int, logits: NDArray[Any], limit: float) -> NDArray[np.bool_]:
        """Which rows leave at a stage; all of them at the last one. (R, C) -> (R,)."""
        if stage == len(self.depths) - 1:
            return np.ones(len(logits), bool)
        if not limit or not self.options.rule or stage in self.closed:
            return np.zeros(len(logits), bool)
        most = limit * float(self.to_come[stage])  # risk; compared as log-odds, which need no exponential
        intercept, slope = self.options.rule[stage]
        bound = math.inf if most >= 1 else math.log(most / (1 - most))
        result: NDArray[np.bool_] = intercept + slope * margin(logits, self.task) < bound
        return result

    def leave(self, logits: NDArray[Any], limit: float) -> NDArray[np.int64]:
        """The definition: the stage at which each row leaves, from the logits of all stages. (R, S, C) -> (R,)."""
        gone = np.stack([self.leaves(stage, logits[:, stage], limit) for stage in range(logits.shape[1])], axis=1)
        stage: NDArray[np.int64] = gone.argmax(axis=1)
        return stage


def margin(logits: NDArray[Any], task: str) -> NDArray[np.float64]:
    """How far an answer is from another one: the gap between the first two classes, or the least sure label's."""
    values = np.asarray(logits, np.float64)
    if task == MULTI:
        values = np.stack([-np.abs(values).min(axis=1) / 2, np.abs(values).min(axis=1) / 2], axis=1)
    top = np.partition(values, -2, axis=1)[:, -2:]
    gap: NDArray[np.float64] = top[:, 1] - top[:, 0]
    return gap


def same_answer(a: NDArray[Any], b: NDArray[Any], task: str) -> NDArray[np.bool_]:
    """Whether two sets of logits give the same labels. (R, C), (R, C) -> (R,)."""
    same = ((a > 0) == (b > 0)).all(axis=1) if task == MULTI else a.argmax(axis=1) == b.argmax(axis=1)
    return np.asarray(same)


def fit_rule(logits: NDArray[Any], task: str) -> list[list[float]]:
    """P(disagree) by the margin, a logistic regression per stage but the last, on held-out rows. (R, S, C)."""
    return [_fit_risk(margin(logits[:, s], task), ~same_answer(logits[:, s], logits[:, -1], task))
            for s in range(logits.shape[1] - 1)]  # fmt: skip


def mix_words(logits: NDArray[Any], labels: NDArray[Any], task: str) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """How much of its layers and how much of the words each later stage's answer is made of, and those answers.

    The two factors, neither negative, make the labels of held-out rows likeliest (for regression: nearest).
    Stage 0 is the words. (R, S, C) -> (S - 1, 2), (R, S, C).
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    stages = np.asarray(logits, np.float64)
    words, shares = stages[:, 0], list[NDArray[np.float64]]()

    def loss(factors: NDArray[np.float64], layers: NDArray[np.float64]) -> float:
        answer = factors[0] * layers + factors[1] * words
        if task == REGRESSION:
            return float(np.square(answer[:, 0] - labels).mean())
        if task == MULTI:
            return float((np.logaddexp(0, answer) - labels * answer).mean())
        return float(-log_softmax(answer, axis=1)[np.arange(len(labels)), labels].mean())

    for layers in np.moveaxis(stages, 1, 0)[1:]:
        best = minimize(loss, np.array([0.5, 0.5]), layers, method="L-BFGS-B", bounds=[(0, 5)] * 2).x
        shares.append(best if best.any() else np.array([1.0, 0.0]))
    answers = [a * stages[:, s] + b * words for s, (a, b) in enumerate(shares, 1)]
    return np.array(shares), np.stack([words, *answers], axis=1)


def _fit_risk(margins: NDArray[np.float64], differs: NDArray[np.bool_]) -> list[float]:
    """Intercept and slope of a logistic regression; more margin is never more risk.

    Half a row that differs, at the median margin, and a weak penalty on the slope keep it finite where none does.
    """
    from scipy.optimize import minimize

    scale = max(float(margins.std()), 1e-9)
    x = np.append(margins, np.median(margins)) / scale
    weight, y = np.append(np.ones(len(margins)), 0.5), np.append(differs, True).astype(float)

    def loss(w: NDArray[np.float64]) -> float:
        z = w[0] + w[1] * x
        return float((weight * (np.logaddexp(0, z) - y * z)).sum() + 0.01 * w[1] ** 2)

    intercept, slope = minimize(loss, np.array([-1.0, -1.0]), method="BFGS").x
    if slope > 0:
        rate = float((weight * y).sum() / weight.sum())
        return [math.log(rate / (1 - rate)), 0.0] if rate < 1 else [50.0, 0.0]
    return [float(intercept), float(slope) / scale]
