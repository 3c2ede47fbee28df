"""The micro-batcher: one thread tokenises, one owns the model, and the event loop only awaits futures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

# Attention alone pays for padding, so a batch may hold this much of it for each real token, and a little in any case.
_PADDING, _PADDING_FREE = 0.5, 512


class Work(Protocol):
    """What a text becomes before it can be batched."""

    @property
    def tokens(self) -> int: ...


class Job:
    """One request. The future gets, in order, each text's work and result, once all are there."""

    __slots__ = ("dial", "future", "left", "results", "texts")

    def __init__(self, texts: Any, dial: Hashable) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.texts, self.dial = texts, dial
        self.results: list[Any] = []
        self.left = 0


@dataclass(slots=True, eq=False)
class Row:
    """One text on its way to the model; without a dial, a function that runs by itself."""

    work: Any
    tokens: int
    dial: Hashable
    job: Job
    place: int
    since: float


def choose(rows: Sequence[Row], batch_tokens: int) -> list[Row]:
    """The next batch: the oldest row, and with it those of its dial that are nearest in length.

    It holds at most `batch_tokens`, padding included, and little padding; a row longer than that goes alone.
    """
    oldest = rows[0]
    if oldest.dial is None:
        return [oldest]
    peers = sorted((row for row in rows if row.dial == oldest.dial), key=lambda row: row.tokens)
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


class Batcher:
    """Runs the texts of many jobs in batches. `close` first finishes what is waiting.

    `encode(texts)` gives a work for each text, `run(works, dial)` a result for each work. A row whose future is
    done, because its client left or ran out of time, is not begun.
    """

    def __init__(
        self,
        encode: Callable[[Any], Sequence[Work]],
        run: Callable[[list[Any], Any], Sequence[Any]],
        *,
        batch_tokens: int,
        wait: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encode, self._run, self._clock = encode, run, clock
        self._batch_tokens, self._wait = batch_tokens, wait
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._rows: list[Row] = []
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads; after `close`, once more."""
        self._closed = False
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

    def submit(self, texts: Any, dial: Hashable) -> asyncio.Future[list[tuple[Any, Any]]]:
        """Queue texts; the future is to be awaited, or cancelled, in the calling event loop."""
        job = Job(texts, dial)
        self._inbox.put(job)
        return job.future

    def call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run a function on the model's thread, by itself."""
        job = Job(function, None)
        self._inbox.put(job)
        return job.future

    def patience(self, rows: Sequence[Row]) -> float:
        """For how many more seconds the oldest row may wait for company."""
        oldest = rows[0]
        if oldest.dial is None or self._closed:
            return 0
        if sum(row.tokens for row in rows if row.dial == oldest.dial) >= self._batch_tokens:
            return 0
        return oldest.since + self._wait - self._clock()

    def _tokenize(self) -> None:
        while job := self._inbox.get():
            if job.future.done():
                continue
            now = self._clock()
            try:
                works = [(job.texts, 0)] if job.dial is None else [(w, w.tokens) for w in self._encode(job.texts)]
            except Exception as error:
                job.future.get_loop().call_soon_threadsafe(_settle, job, error)
                continue
            job.results, job.left = [None] * len(works), len(works)
            with self._changed:
                self._rows += [Row(work, tokens, job.dial, job, i, now) for i, (work, tokens) in enumerate(works)]
                self._changed.notify()

    def _serve(self) -> None:
        while batch := self._next():
            loop = batch[0].job.future.get_loop()
            loop.call_soon_threadsafe(_deliver, batch, self._results(batch))

    def _next(self) -> list[Row]:
        """Wait for a batch; an empty one says that the batcher is closed and done."""
        with self._changed:
            while True:
                self._rows = [row for row in self._rows if not row.job.future.done()]
                if not self._rows:
                    if self._closed:
                        return []
                    self._changed.wait()
                elif (left := self.patience(self._rows)) > 0:
                    self._changed.wait(left)
                else:
                    batch = choose(self._rows, self._batch_tokens)
                    taken = set(map(id, batch))
                    self._rows = [row for row in self._rows if id(row) not in taken]
                    return batch

    def _results(self, batch: list[Row]) -> list[Any]:
        """A result or an exception for each row. What makes a batch fail must not fail its neighbours."""
        dial = batch[0].dial
        try:
            if dial is None:
                return [batch[0].work()]
            return list(self._run([row.work for row in batch], dial))
        except Exception as error:
            if len(batch) == 1:
                return [error]
            return [self._results([row])[0] for row in batch]


def _deliver(batch: list[Row], results: list[Any]) -> None:
    for row, result in zip(batch, results, strict=True):
        job = row.job
        if row.dial is None or isinstance(result, Exception):
            _settle(job, result)
            continue
        job.results[row.place] = (row.work, result)
        job.left -= 1
        if not job.left:
            _settle(job, job.results)


def _settle(job: Job, result: Any) -> None:
    if job.future.done():
        return
    if isinstance(result, Exception):
        job.future.set_exception(result)
    else:
        job.future.set_result(result)
