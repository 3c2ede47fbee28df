"""Batches across jobs: who goes together, who waits, and what happens to those that left."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetformer.serving.batcher import Batcher, Encoded, Row, choose


def rows_of(*lengths: int, dial: str | None = "learned", since: float = 0.0) -> list[Row]:
    async def make() -> list[Row]:
        return [Row(n, n, dial, asyncio.get_running_loop().create_future(), since) for n in lengths]

    return asyncio.run(make())


def lengths(batch: list[Row]) -> list[int]:
    return [row.tokens for row in batch]


def test_a_batch_holds_the_oldest_row_and_its_nearest_in_length() -> None:
    rows = rows_of(300, 2000, 310, 290, 2100, 305)
    assert lengths(choose(rows, 100_000)) == [290, 300, 305, 310]


def test_little_padding_is_no_reason_to_leave_a_row_behind() -> None:
    assert lengths(choose(rows_of(5, 40, 60), 100_000)) == [5, 40, 60]


def test_a_batch_keeps_the_token_budget_with_padding() -> None:
    assert lengths(choose(rows_of(10, 10, 10, 10), 30)) == [10, 10, 10]
    assert lengths(choose(rows_of(10, 11), 21)) == [10]
    assert lengths(choose(rows_of(50, 10), 20)) == [50]  # it must be run some time


def test_a_batch_has_one_dial_the_oldest_rows() -> None:
    rows = [*rows_of(10, dial="full"), *rows_of(10, 10), *rows_of(12, dial="full")]
    assert [(row.dial, row.tokens) for row in choose(rows, 1000)] == [("full", 10), ("full", 12)]


def test_a_function_runs_by_itself() -> None:
    rows = [*rows_of(0, dial=None), *rows_of(0, dial=None)]
    assert choose(rows, 1000) == rows[:1]


@given(st.lists(st.integers(1, 600), min_size=1, max_size=60), st.integers(1, 4000))
def test_every_choice_holds_the_oldest_and_fits(tokens: list[int], budget: int) -> None:
    rows = rows_of(*tokens)
    batch = choose(rows, budget)
    assert rows[0] in batch
    assert len({id(row) for row in batch}) == len(batch)
    assert len(batch) == 1 or len(batch) * max(lengths(batch)) <= budget


def encode(texts: Sequence[Any], dial: str) -> list[Encoded]:
    return [Encoded(n + 0, n) for n in texts]


def late(row: Row) -> str:
    return "late" if row.best is None else row.best()


def idle(*, now: float = 0.0, wait: float = 0.5) -> Batcher:
    return Batcher(encode, lambda rows, dial: rows, batch_tokens=100, wait=wait, late=late, clock=lambda: now)


def test_the_oldest_row_waits_for_company_until_its_time_is_up_or_the_batch_is_full() -> None:
    assert idle(now=10.0).patience(rows_of(40, since=9.8)) == pytest.approx(0.3)
    assert idle(now=10.0).patience(rows_of(40, since=9.0)) <= 0
    assert idle(now=10.0).patience(rows_of(40, 60, since=9.8)) == 0
    assert idle(now=10.0).patience([*rows_of(40, since=9.8), *rows_of(60, dial="full")]) > 0
    assert idle(now=10.0).patience(rows_of(0, dial=None, since=10.0)) == 0


class Bench:
    """A batcher whose model stands still while `gate` is closed."""

    def __init__(self, run: Callable[[list[int]], Sequence[Any]] | None = None, *, wait: float = 0.0) -> None:
        self.batches: list[list[int]] = []
        self.gate, self.begun = threading.Event(), threading.Event()
        self.threads: set[str] = set()
        self._inner = run or (lambda works: [work * 2 for work in works])
        self.batcher = Batcher(encode, self._run, batch_tokens=1000, wait=wait, late=late)
        self.batcher.start()

    def _run(self, rows: list[Row], dial: str) -> Sequence[Any]:
        works = [row.work for row in rows]
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        self.gate.wait()
        self.batches.append(list(works))
        return self._inner(works)

    async def hold(self) -> asyncio.Future[Any]:
        """Keep the model busy with a text of one token."""
        future = self.batcher.submit([1], "learned")
        await asyncio.to_thread(self.begun.wait)
        return future


def test_jobs_share_a_batch_and_get_their_own_results_in_order() -> None:
    async def main() -> None:
        bench = Bench()
        held = await bench.hold()
        first, second = bench.batcher.submit([30, 10], "learned"), bench.batcher.submit([20], "learned")
        alone = bench.batcher.call(lambda: threading.current_thread().name)
        await asyncio.to_thread(waiting, bench.batcher, 4)
        bench.gate.set()
        assert await held == [2]
        assert await first == [60, 20]
        assert await second == [40]
        assert await alone == "model"
        assert bench.batches == [[1], [10, 20, 30]]
        assert bench.threads == {"model"}
        bench.batcher.close()

    asyncio.run(main())


def waiting(batcher: Batcher, rows: int) -> None:
    """Return once so many rows wait; the condition is the batcher's own, so nothing is polled."""
    with batcher._changed:
        while len(batcher._rows) < rows:
            batcher._changed.wait(1)


def test_a_cancelled_job_is_never_begun() -> None:
    async def main() -> None:
        bench = Bench()
        held = await bench.hold()
        left, stays = bench.batcher.submit([50], "learned"), bench.batcher.submit([60], "learned")
        await asyncio.to_thread(waiting, bench.batcher, 2)
        left.cancel()
        bench.gate.set()
        await held
        await stays
        assert bench.batches == [[1], [60]]
        bench.batcher.close()

    asyncio.run(main())


def test_closing_finishes_what_waits() -> None:
    async def main() -> None:
        bench = Bench(wait=1000.0)
        bench.gate.set()
        futures = [bench.batcher.submit([n], "learned") for n in (10, 20)]
        await asyncio.to_thread(bench.batcher.close)
        assert [(await future)[0] for future in futures] == [20, 40]

    asyncio.run(main())


def test_what_makes_a_batch_fail_fails_alone() -> None:
    def run(works: list[int]) -> list[int]:
        if 13 in works:
            raise ValueError("thirteen")
        return works

    async def main() -> None:
        bench = Bench(run)
        held = await bench.hold()
        futures = [bench.batcher.submit([n], "learned") for n in (12, 13, 14)]
        await asyncio.to_thread(waiting, bench.batcher, 3)
        bench.gate.set()
        await held
        assert await futures[0] == [12]
        assert await futures[2] == [14]
        with pytest.raises(ValueError, match="thirteen"):
            await futures[1]
        bench.batcher.close()

    asyncio.run(main())


def test_a_text_that_cannot_be_tokenised_fails_its_job_alone() -> None:
    async def main() -> None:
        bench = Bench()
        bench.gate.set()
        wrong, right = bench.batcher.submit([None], "learned"), bench.batcher.submit([5], "learned")
        assert await right == [10]
        with pytest.raises(TypeError):
            await wrong
        bench.batcher.close()

    asyncio.run(main())


def test_texts_with_a_deadline_go_first_by_themselves_and_do_not_wait() -> None:
    usual, urgent = rows_of(10, 11, since=1.0), rows_of(10, 12, since=1.05)
    urgent[0].due, urgent[1].due = 1.09, 1.07
    rows = sorted([*usual, *urgent], key=lambda row: row.rank)
    assert rows == [urgent[1], urgent[0], *usual]
    assert choose(rows, 1000) == urgent
    assert idle(now=1.05).patience(rows) == 0
    urgent[0].due = urgent[1].due = 1.2  # later than what an ordinary text is given
    assert min([*usual, *urgent], key=lambda row: row.rank) is usual[0]


def test_a_batch_is_small_enough_for_its_first_row_to_be_in_time() -> None:
    (row,) = rows_of(10)
    batcher = Batcher(
        encode, lambda rows, dial: rows, batch_tokens=800, wait=0, late=late, expect=lambda t: t / 1e4, clock=lambda: 1
    )
    assert batcher.room(row) == 800
    for due, tokens in ((1.1, 800), (1.03, 200), (1.0, 6), (0.5, 6)):  # below its 10 tokens: it goes alone
        row.due = due
        assert batcher.room(row) == tokens


def test_what_is_due_is_answered_while_the_model_is_busy() -> None:
    async def main() -> None:
        bench = Bench()
        held = await bench.hold()
        assert await bench.batcher.submit([20, 30], "learned", asyncio.get_running_loop().time()) == ["late", "late"]
        bench.gate.set()
        assert await held == [2]
        assert await bench.batcher.submit([40], "learned", asyncio.get_running_loop().time() + 3600) == [80]
        assert bench.batches == [[1], [40]]
        bench.batcher.close()

    asyncio.run(main())


def test_what_the_model_cannot_answer_in_time_does_not_wait_for_it() -> None:
    async def main() -> None:
        bench, skipped = Bench(), list[None]()
        bench.gate.set()
        bench.batcher._expect, bench.batcher._skipped = lambda tokens: 60.0 * tokens, lambda: skipped.append(None)
        now = asyncio.get_running_loop().time()
        assert await bench.batcher.submit([20, 30], "learned", now + 600) == ["late", "late"]
        assert await bench.batcher.submit([9, 30], "learned", now + 600) == [18, 60]  # one of them may be in time
        assert await bench.batcher.submit([40], "learned") == [80]  # without a deadline
        assert len(skipped) == 1
        assert [work for batch in bench.batches for work in batch] == [9, 30, 40]
        bench.batcher.close()

    asyncio.run(main())


def test_what_is_known_before_the_model_runs_is_answered_at_once() -> None:
    async def main() -> None:
        bench = Bench()
        bench.batcher._encode = lambda texts, dial: [Encoded(n, n, None, 7 if n > 5 else None) for n in texts]
        held = await bench.hold()
        assert await bench.batcher.submit([20, 30], "learned") == [7, 7]
        bench.gate.set()
        assert await held == [2]
        bench.batcher.close()

    asyncio.run(main())


def test_idle_time_is_for_what_can_wait_one_piece_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("a text")

    async def main() -> None:
        bench, order = Bench(), list[str]()
        held = await bench.hold()
        for function in (fail, lambda: order.append("idle")):
            bench.batcher.when_idle(function)
        asked = bench.batcher.call(lambda: order.append("asked"))
        bench.gate.set()
        await held
        await asked
        while "idle" not in order:
            await asyncio.sleep(0)
        assert order == ["asked", "idle"]
        bench.batcher.close()

    asyncio.run(main())
    assert "ValueError in idle time" in caplog.text
    assert "a text" not in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_once_there_is_a_deadline_threads_that_compute_have_a_lower_priority() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def main() -> None:
        bench = Bench(lambda works: [priority() for _ in works])
        bench.gate.set()
        usual = priority()
        assert await bench.batcher.submit([1], "learned") == [usual]
        assert await bench.batcher.submit([1], "learned", asyncio.get_running_loop().time() + 60) == [usual + 10]
        assert await bench.batcher.submit([1], "learned") == [usual + 10]
        assert priority() == usual
        assert os.getpriority(os.PRIO_PROCESS, bench.batcher._threads[0].native_id or 0) == usual
        bench.batcher.close()

    asyncio.run(main())
