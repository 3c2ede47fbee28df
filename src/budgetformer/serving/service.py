"""The service behind the routes: who is let in, and how work reaches the model and comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse

from budgetformer.nn.allocation import Dial
from budgetformer.serving.batcher import Batcher
from budgetformer.serving.engine import Engine, Result, Text, Work
from budgetformer.serving.messages import Refusal, busy
from budgetformer.serving.metrics import Metrics
from budgetformer.serving.settings import Settings

T = TypeVar("T")
logger = logging.getLogger("budgetformer.serving")


class Service:
    """One engine behind one batcher. All but the engine's work happens on the event loop's thread."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings, self.metrics = engine, settings, Metrics()
        self.inside = 0  # texts that were taken in and not yet answered
        self._not_ready: str | None = "the self-test is running"
        self._batcher = Batcher(
            engine.encode, self._run, batch_tokens=settings.batch_tokens, wait=settings.wait_ms / 1000
        )

    async def start(self) -> None:
        """Start the model's thread; ready once its self-test has passed."""
        self._batcher.start()
        try:
            await self._batcher.call(self.engine.self_test)
            self._not_ready = None
        except Exception as error:
            self._not_ready = f"the self-test failed ({type(error).__name__})"
            logger.error("%s: %s", self._not_ready, error)

    def close(self) -> None:
        """Finish what is waiting, and stop."""
        self._batcher.close()

    def check_ready(self) -> None:
        if self._not_ready:
            raise busy("not_ready", self._not_ready)

    def answer(self, refusal: Refusal) -> JSONResponse:
        self.metrics.refused.labels(refusal.code).inc()
        return JSONResponse(refusal.body, refusal.status_code, refusal.headers)

    async def predict(self, request: Request, texts: Sequence[Text], dial: Dial) -> list[tuple[Work, Result]]:
        """Each text as the model read it, and what the model said."""
        with self._places(len(texts)):
            return await self._attended(request, self._batcher.submit(texts, dial))

    async def call(self, request: Request, function: Callable[[], T]) -> T:
        """Run a function on the model's thread for one client."""
        with self._places(1):
            return await self._attended(request, self._batcher.call(function))

    @contextmanager
    def _places(self, texts: int) -> Iterator[None]:
        if self.inside + texts > self.settings.queue:
            raise busy("queue_full", f"{self.inside} texts are waiting, and {self.settings.queue} may wait")
        self.inside += texts
        self.metrics.queue.set(self.inside)
        try:
            yield
        finally:
            self.inside -= texts
            self.metrics.queue.set(self.inside)

    async def _attended(self, request: Request, work: asyncio.Future[T]) -> T:
        """The work's result, unless time runs out or the client leaves first: then it is dropped, if not begun."""
        gone = asyncio.ensure_future(request.receive())
        try:
            left = request.state.deadline - asyncio.get_running_loop().time()
            await asyncio.wait((work, gone), timeout=max(0, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                raise Refusal(499, "client_closed", "the client went away", "wait for the answer")
            raise Refusal(
                504, "timeout", f"no answer within {self.settings.timeout:g} s", "send fewer texts, or try again later"
            )
        finally:
            work.cancel()
            gone.cancel()

    def _run(self, pieces: list[Work], dial: Dial) -> list[Result]:
        results = self.engine.run(pieces, dial)
        metrics = self.metrics
        metrics.batch.observe(len(pieces))
        metrics.texts.inc(len(pieces))
        metrics.tokens.inc(sum(piece.tokens for piece in pieces))
        metrics.cut.inc(sum(piece.truncated for piece in pieces))
        metrics.used.inc(sum(result.heads for result in results))
        metrics.possible.inc(len(results) * self.engine.possible)
        return results
