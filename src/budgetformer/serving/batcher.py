"""The micro-batcher: one thread tokenises, one owns the model, and the event loop only awaits futures."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from queue import SimpleQueue
from typing import Any, NamedTuple

# Attention alone pays for padding, so a batch may hold this much of it for each real token, and a little in any case.
_PADDING, _PADDING_FREE = 0.5, 512
_ORDINARY = 0.1  # seconds after which a text without a deadline goes before those whose deadlines come later
_SPARE = 64  # pieces of work that wait for an idle moment
_NICE = 10  # by how much the priority of threads that compute is lowered where there are deadlines
logger = logging.getLogger("budgetformer.serving")


@dataclass(slots=True, eq=False)
class Row:
    """One text on its way to the model; without a dial, a function that runs by itself."""

    work: Any
    tokens: int
    dial: Hashable
    future: asyncio.Future[Any]
    since: float
    due: float | None = None  # when it is answered with the best that there is
    best: Callable[[], Any] | None = None  # makes the answer so far

    @property
    def rank(self) -> float:
        """Rows are taken in this order: the earliest deadline first."""
        return self.since + _ORDINARY if self.due is None else self.due

    @property
    def kind(self) -> Hashable:
        """Rows of one kind may share a batch: one without a deadline must not hold up one that has."""
        return self.dial, self.due is None


class Encoded(NamedTuple):
    """A text as the model reads it; `best` makes the answer that is known already, `result` is one that will do."""

    work: Any
    tokens: int
    best: Callable[[], Any] | None = None
    result: Any = None


@dataclass(slots=True, eq=False)
class _Job:
    """The texts of a request; `rows` once they are tokenised."""

    texts: Sequence[Any]
    dial: Hashable
    futures: list[asyncio.Future[Any]]
    due: float | None
    rows: list[Row] = field(default_factory=list)


def choose(rows: Sequence[Row], batch_tokens: int) -> list[Row]:
    """The next batch: the first row, and with it those of its kind that are nearest in length.

    It holds at most `batch_tokens`, padding included, and little padding; a row longer than that goes alone.
    """
    oldest = rows[0]
    if oldest.dial is None:
        return [oldest]
    peers = sorted((row for row in rows if row.kind == oldest.kind), key=lambda row: row.tokens)
    low = next(place for place, row in enumerate(peers) if row is oldest)
    high, longest, real = low + 1, oldest.tokens, oldest.tokens
    while low > 0 or high < len(peers):
        size = high - low
        shorter = longest - peers[low - 1].tokens if low > 0 else None
        longer = size * (peers[high].tokens - longest) if high < len(peers) else None
        down = longer is None or (shorter is not None and shorter <= longer)
        row = peers[low - 1] if down else peers[high]
        padded = (size + 1) * max(longest, row.tokens)
        if padded > batch_tokens or padded - real - row.tokens > _PADDING_FREE + _PADDING * real:
            break
        low, high = (low - 1, high) if down else (low, high + 1)
        longest, real = max(longest, row.tokens), real + row.tokens
    return peers[low:high]


def lower_priority(answering: Collection[int | None]) -> None:
    """Lower the priority of this process's threads but for these, by native id; on Linux, where each has its own.

    Reading requests and writing answers takes little time, but a core that computes is busy for milliseconds.
    """
    if sys.platform == "linux":
        lower = min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
        for thread in {int(name) for name in os.listdir("/proc/self/task")} - set(answering):
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, lower)


class Batcher:
    """Runs the texts of many requests in batches. `close` first finishes what is waiting.

    `encode(texts, dial)` makes each text readable, and may know its result; `run(rows, dial)` gives a result for each.
    A row whose future is done, because its client left or its time was up, is not begun. When a row is due, its result
    is `late(row)`; `expect(tokens)` says how many seconds go by until a batch has a better answer for its rows. Rows
    that are due before that do not wait for it, and `skipped` is told.
    """

    def __init__(
        self,
        encode: Callable[[Any, Any], Sequence[Encoded]],
        run: Callable[[list[Row], Any], Sequence[Any]],
        *,
        batch_tokens: int,
        wait: float,
        late: Callable[[Row], Any],
        expect: Callable[[int], float] = lambda tokens: 0.0,
        skipped: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encode, self._run, self._clock = encode, run, clock
        self._batch_tokens, self._wait, self._late = batch_tokens, wait, late
        self._expect, self._skipped = expect, skipped
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._rows: list[Row] = []
        self._spare: deque[Callable[[], None]] = deque(maxlen=_SPARE)
        self._changed = threading.Condition()
        self._closed = False
        self._deadline_seen = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads; after `close`, once more."""
        self._closed = self._deadline_seen = False
        works = (("tokenizer", self._tokenize), ("model", self._serve))
        self._threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in works]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        tokenizer, model = self._threads
        self._inbox.put(None)
        tokenizer.join()
        with self._changed:
            self._closed = True
            self._changed.notify()
        model.join()

    def submit(self, texts: Sequence[Any], dial: Hashable, due: float | None = None) -> asyncio.Future[list[Any]]:
        """Queue texts; the future of their results is to be awaited, or cancelled, in the calling event loop."""
        loop = asyncio.get_running_loop()
        job = _Job(texts, dial, [loop.create_future() for _ in texts], due)
        results = asyncio.gather(*job.futures)
        if due is not None:
            if not self._deadline_seen:  # from here on: threads that others start have their starter's priority
                self._deadline_seen = True
                tokenizer, _ = self._threads
                lower_priority({threading.main_thread().native_id, threading.get_native_id(), tokenizer.native_id})
            timer = loop.call_at(due, self._expire, job)
            results.add_done_callback(lambda _: timer.cancel())
        self._inbox.put(job)
        return results

    def call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run a function on the model's thread, by itself."""
        future = asyncio.get_running_loop().create_future()
        self._add([Row(function, 0, None, future, self._clock())])
        return future

    def when_idle(self, function: Callable[[], None]) -> None:
        """Run a function on the model's thread when nothing waits; of too many, the oldest are forgotten."""
        with self._changed:
            self._spare.append(function)
            self._changed.notify()

    def _expire(self, job: _Job) -> None:
        """Answer what is due, in the event loop; what is not tokenised yet is answered as soon as it is."""
        rows = [row for row in job.rows if not row.future.done()]
        _deliver([row.future for row in rows], [self._late(row) for row in rows])

    def _add(self, rows: list[Row]) -> None:
        with self._changed:
            self._rows += rows
            self._changed.notify()

    def patience(self, rows: Sequence[Row]) -> float:
        """For how many more seconds the first row may wait for others to share its batch; one with a deadline: 0."""
        oldest = rows[0]
        if oldest.dial is None or oldest.due is not None or self._closed:
            return 0
        if sum(row.tokens for row in rows if row.kind == oldest.kind) >= self._batch_tokens:
            return 0
        return oldest.since + self._wait - self._clock()

    def room(self, row: Row) -> int:
        """The tokens of a batch that begins with this row: so many that there is a better answer before it is due."""
        tokens = self._batch_tokens
        while row.due is not None and tokens > row.tokens and self._clock() + self._expect(tokens) > row.due:
            tokens //= 2
        return tokens

    def _tokenize(self) -> None:
        while job := self._inbox.get():
            if job.futures[0].done():
                continue
            now, soon = self._clock(), job.futures[0].get_loop().call_soon_threadsafe
            try:
                encoded = self._encode(job.texts, job.dial)
            except Exception as error:
                soon(_deliver, job.futures, [error] * len(job.futures))
                continue
            job.rows = [
                Row(each.work, each.tokens, job.dial, future, now, job.due, each.best)
                for each, future in zip(encoded, job.futures, strict=True)
            ]
            known = [each.result is not None for each in encoded]
            if any(known):
                soon(_deliver, [*compress(job.futures, known)], [each.result for each in compress(encoded, known)])
            rows = [row for row, done in zip(job.rows, known, strict=True) if not done]
            soonest = min((self._expect(row.tokens) for row in rows), default=0.0)
            if rows and job.due is not None and self._clock() + soonest >= job.due:
                self._skipped()
                soon(self._expire, job)
            else:
                self._add(rows)

    def _serve(self) -> None:
        while work := self._next():
            if callable(work):
                try:
                    work()
                except Exception as error:  # no message: it may hold a text
                    logger.error("%s in idle time", type(error).__name__)
                continue
            futures = [row.future for row in work]
            futures[0].get_loop().call_soon_threadsafe(_deliver, futures, self._results(work))

    def _next(self) -> list[Row] | Callable[[], None] | None:
        """Wait for a batch, or for something to do in idle time; None says that the batcher is closed and done."""
        with self._changed:
            while True:
                self._rows = sorted((row for row in self._rows if not row.future.done()), key=lambda row: row.rank)
                if not self._rows:
                    if self._closed:
                        return None
                    if self._spare:
                        return self._spare.popleft()
                    self._changed.wait()
                elif (left := self.patience(self._rows)) > 0:
                    self._changed.wait(left)
                else:
                    batch = choose(self._rows, self.room(self._rows[0]))
                    taken = set(map(id, batch))
                    self._rows = [row for row in self._rows if id(row) not in taken]
                    return batch

    def _results(self, batch: list[Row]) -> list[Any]:
        """A result or an exception for each row. What makes a batch fail must not fail its neighbours."""
        dial = batch[0].dial
        try:
            if dial is None:
                return [batch[0].work()]
            return list(self._run(batch, dial))
        except Exception as error:
            if len(batch) == 1:
                return [error]
            return [self._results([row])[0] for row in batch]


def _deliver(futures: list[asyncio.Future[Any]], results: list[Any]) -> None:
    for future, result in zip(futures, results, strict=True):
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
