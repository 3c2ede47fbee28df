"""Deadlines: how long a stage takes in this process, and which texts of a batch go without the next one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetformer.exits import StageResult
from budgetformer.serving.batcher import Row

_GAIN, _SPREAD_GAIN, _SPREADS = 1 / 8, 1 / 4, 4  # as TCP estimates a round trip
_HALF_LIFE = 1.0  # seconds of an estimate that keeps texts out: one bad moment must not keep them out for good
_FADE_AT_ONCE = 0.25  # at most so many seconds fade with one text, or the first after a quiet hour would forget all


class Estimate(NamedTuple):
    """What a stage takes for texts of one size, in seconds, and when it was last learnt or faded."""

    mean: float
    spread: float  # mean deviation
    since: float


class Pace:
    """How long each stage takes, by the tokens that go through it with padding: running means and mean deviations."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[int, dict[int, Estimate]] = {}  # by stage and by the tokens' power of two

    def learn(self, stage: int, tokens: int, seconds: float) -> None:
        sizes, size, now = self._seen.setdefault(stage, {}), tokens.bit_length(), self._clock()
        if size not in sizes:
            sizes[size] = Estimate(seconds, seconds / 2, now)
            return
        mean, spread, _ = sizes[size]
        error = seconds - mean
        sizes[size] = Estimate(mean + _GAIN * error, spread + _SPREAD_GAIN * (abs(error) - spread), now)

    def expect(self, stage: int, tokens: int) -> float:
        """The seconds within which a stage ends as a rule; 0 before it was seen. Other sizes are scaled by tokens."""
        if not (sizes := self._seen.get(stage)):
            return 0.0
        size = tokens.bit_length()
        nearest = min(sizes, key=lambda other: abs(other - size))
        return (sizes[nearest].mean + _SPREADS * sizes[nearest].spread) * 2.0 ** (size - nearest)

    def fade(self, stage: int) -> None:
        """Expect less of a stage that a text did not enter: half as long after a second without news of its size."""
        now, sizes = self._clock(), self._seen.get(stage, {})
        for size, (mean, spread, since) in list(sizes.items()):  # another thread may learn a new size
            left = 0.5 ** (min(now - since, _FADE_AT_ONCE) / _HALF_LIFE)
            sizes[size] = Estimate(mean * left, spread * left, now)


class Watch:
    """Sees one batch through its stages (an `AfterStage`): keeps the answers so far of texts with a deadline, and sends
    those out that the next stage would make late, and those that need no answer any more.

    `answer(work, stage, logits, heads, cut)` makes an answer; `cut` says that the deadline ended it, not the exit rule.
    """

    def __init__(self, rows: Sequence[Row], answer: Callable[..., Any], pace: Pace, clock: Callable[[], float]) -> None:
        self._rows, self._answer, self._pace, self._clock = rows, answer, pace, clock
        self._due = np.array([math.inf if row.due is None else row.due for row in rows])
        self._lengths = np.array([row.tokens for row in rows])
        self._tokens, self._since = self._padded(np.arange(len(rows))), clock()
        self.cut = np.zeros(len(rows), bool)  # whose deadline ended it

    def __call__(self, result: StageResult) -> NDArray[np.bool_]:
        """Who leaves after this stage."""
        now, following = self._time(result.stage), result.stage + 1
        done = np.array([self._rows[number].future.done() for number in result.rows], bool)
        leaves: NDArray[np.bool_] = result.leaves | done
        late = now + self._pace.expect(following, self._padded(result.rows[~leaves])) > self._due[result.rows]
        if (late & ~leaves).any():
            self.cut[result.rows[late & ~leaves]] = True
            self._pace.fade(following)
        for place in np.flatnonzero(~done & (self._due[result.rows] < math.inf)):
            row, left = self._rows[result.rows[place]], bool(result.leaves[place])
            so_far = (result.stage, result.logits[place], result.heads[place], not left)
            row.best = partial(self._answer, row.work, *so_far)
        leaves |= late
        self._tokens = self._padded(result.rows[~leaves])
        return leaves

    def end(self, last: int) -> None:
        """The last stage is over, for those that came so far."""
        self._time(last)

    def _padded(self, numbers: NDArray[np.int64]) -> int:
        return int(len(numbers) * self._lengths[numbers].max(initial=0))

    def _time(self, stage: int) -> float:
        """The stage that ends now is learnt from, if anything went through it."""
        now = self._clock()
        if self._tokens:
            self._pace.learn(stage, self._tokens, now - self._since)
        self._since = now
        return now
