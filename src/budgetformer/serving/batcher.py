"""The micro-batcher: one thread tokenises, one owns the model, and the event loop only awaits futures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

# Attention alone pays for padding, so a batch may hold this much of it for each real token, and a little in any case.
_PADDING, _PADDING_FREE = 0.5, 512


@dataclass(slots=True, eq=False)
class Row:
    """One text on its way to the model; without a dial, a function that runs by itself."""

    work: Any
    tokens: int
    dial: Hashable
    future: asyncio.Future[Any]
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
    """Runs the texts of many requests in batches. `close` first finishes what is waiting.

    `encode(texts)` gives for each text what the model reads and its number of tokens, `run(works, dial)` a result for
    each. A row whose future is done, because its client left or ran out of time, is not begun.
    """

    def __init__(
        self,
        encode: Callable[[Any], Sequence[tuple[Any, int]]],
        run: Callable[[list[Any], Any], Sequence[Any]],
        *,
        batch_tokens: int,
        wait: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encode, self._run, self._clock = encode, run, clock
        self._batch_tokens, self._wait = batch_tokens, wait
        self._inbox: SimpleQueue[tuple[Sequence[Any], Hashable, list[asyncio.Future[Any]]] | None] = SimpleQueue()
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

    def submit(self, texts: Sequence[Any], dial: Hashable) -> asyncio.Future[list[Any]]:
        """Queue texts; the future of their results is to be awaited, or cancelled, in the calling event loop."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Any]] = [loop.create_future() for _ in texts]
        self._inbox.put((texts, dial, futures))
        return asyncio.gather(*futures)

    def call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run a function on the model's thread, by itself."""
        future = asyncio.get_running_loop().create_future()
        self._add([Row(function, 0, None, future, self._clock())])
        return future

    def _add(self, rows: list[Row]) -> None:
        with self._changed:
            self._rows += rows
            self._changed.notify()

    def patience(self, rows: Sequence[Row]) -> float:
        """For how many more seconds the oldest row may wait for others to share its batch."""
        oldest = rows[0]
        if oldest.dial is None or self._closed:
            return 0
        if sum(row.tokens for row in rows if row.dial == oldest.dial) >= self._batch_tokens:
            return 0
        return oldest.since + self._wait - self._clock()

    def _tokenize(self) -> None:
        while job := self._inbox.get():
            texts, dial, futures = job
            if futures[0].done():
                continue
            now = self._clock()
            try:
                works = zip(self._encode(texts), futures, strict=True)
                self._add([Row(work, tokens, dial, future, now) for (work, tokens), future in works])
            except Exception as error:
                futures[0].get_loop().call_soon_threadsafe(_deliver, futures, [error] * len(futures))

    def _serve(self) -> None:
        while batch := self._next():
            futures = [row.future for row in batch]
            futures[0].get_loop().call_soon_threadsafe(_deliver, futures, self._results(batch))

    def _next(self) -> list[Row]:
        """Wait for a batch; an empty one says that the batcher is closed and done."""
        with self._changed:
            while True:
                self._rows = [row for row in self._rows if not row.future.done()]
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


def _deliver(futures: list[asyncio.Future[Any]], results: list[Any]) -> None:
    for future, result in zip(futures, results, strict=True):
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
