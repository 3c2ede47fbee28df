"""Connections that cannot take the service down: headers have their time, connections and log lines their number."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
LINES_A_MINUTE = 10  # that one place in the code may log
_MOST = 2048  # connections of a process, where its file limit allows them
_AT_ONCE = 16  # connections that are accepted in one turn of the loop
_RESERVED = 4 * _AT_ONCE + 64  # one is accepted, looked at and closed in 4 turns; and the process has files of its own


class Loop(asyncio.SelectorEventLoop):
    """An event loop that accepts a few connections at a time, however many wait.

    asyncio's own accepts as many as the backlog holds before their protocols can refuse any, and where files run out
    it logs an error for each.
    """

    async def create_server(  # type: ignore[override]
        self, *args: Any, sock: Any, backlog: int, **options: Any
    ) -> asyncio.Server:
        server = await super().create_server(*args, sock=sock, backlog=_AT_ONCE, **options)
        sock.listen(backlog)
        return server


def most_connections() -> int:
    """The connections that this process may have: its file limit must hold them, and those that come and go."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if files == resource.RLIM_INFINITY else max(1, min(_MOST, files - _RESERVED))


class Connection(H11Protocol):
    """A connection that is closed if a header takes too long, or if it waits for one and a newer needs its place."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.since = self.loop.time()  # of its beginning, or of its last answer
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """Whether it is open, and no request is unanswered whose header is complete."""
        answered = self.conn.their_state is h11.IDLE or (self.cycle is not None and self.cycle.response_complete)
        return answered and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_header()
        if len(self.connections) > (most := most_connections()):
            others: Any = [other for other in self.connections if not other.transport.is_closing()]
            if len(others) > most:
                min((other for other in others if other.waits), key=lambda other: other.since).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_header()

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _time_header(self) -> None:
        """The clock runs from a header's first byte (of a new connection: from its beginning) to its end."""
        if self.waits and self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.timeout_keep_alive_handler)
        elif not self.waits and self._timer is not None:
            self._timer.cancel()
            self._timer = None


class RateLimit(logging.Filter):
    """Lets each place in the code log a few lines a minute; the first one after that says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[str, int], tuple[float, int]] = {}  # since when, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), time.monotonic()
        since, lines = self._lines.get(place, (now, 0))
        if now - since >= 60:
            if lines > LINES_A_MINUTE:
                record.msg, record.args = f"{record.getMessage()} (and {lines - LINES_A_MINUTE} more before)", ()
            since, lines = now, 0
        self._lines[place] = since, lines + 1
        return lines < LINES_A_MINUTE
