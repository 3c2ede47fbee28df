"""Connections that stop in the middle of a header, too many of them, and what is logged of it."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tests.serving.small import write_run
from tests.serving.test_server import serving
from uvicorn.server import ServerState

from budgetformer.serving import connections
from budgetformer.serving.connections import Connection, Loop, RateLimit

HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1"
WHOLE = HALF + b"\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def app(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", scope["path"] == "/echo"
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (len(body) + 2))]}
    )
    await send({"type": "http.response.body", "body": body + b"ok"})


def play(scene: Callable[[Callable[[], Awaitable[Streams]]], Awaitable[None]]) -> None:
    """Run a scene with a function that connects to a server of this protocol."""

    async def main() -> None:
        config, state = uvicorn.Config(app, lifespan="off", log_config=None), ServerState()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = await asyncio.get_running_loop().create_server(
                lambda: Connection(config, state, {}), sock=listening, backlog=100
            )
            async with asyncio.timeout(30):
                await scene(lambda: asyncio.open_connection(*listening.getsockname()))
            server.close()

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def answered(streams: Streams) -> bool:
    reader, writer = streams
    writer.write(WHOLE)
    return (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


def test_a_header_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.02)

    async def scene(connect: Callable[[], Awaitable[Streams]]) -> None:
        for first in (b"", HALF, WHOLE + HALF):
            reader, writer = await connect()
            writer.write(first)
            if first.startswith(WHOLE):
                await reader.readuntil(b"ok")
                writer.write(b"\r\nX-More: 1")  # it goes on, and never ends
            assert await ended(reader)
            writer.close()

    play(scene)


def test_a_header_without_end_is_refused_before_it_fills_memory() -> None:
    async def scene(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        writer.write(HALF + b"\r\nX-Long: ")
        for _ in range(1000):
            if reader.at_eof() or reader.exception():
                break
            writer.write(b"x" * 10_000)
            await asyncio.sleep(0.001)
        assert reader.at_eof() or reader.exception(), "ten megabytes of header were read"
        writer.close()

    play(scene)


def test_a_body_that_trickles_in_after_its_answer_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.05)

    async def scene(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        writer.write(b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n")
        await reader.readuntil(b"ok")
        sent = 0
        while not (reader.at_eof() or reader.exception()):
            writer.write(b"x")
            sent += 1
            await asyncio.sleep(0.002)
        assert sent < 100_000  # it did not end because the body did
        writer.close()

    play(scene)


def test_a_request_that_asks_for_another_protocol_is_answered_in_this_one() -> None:
    ask = b"POST /echo HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\n"

    async def scene(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        for pieces in ((ask + b"hello",), (ask, b"hello"), (ask[:50], ask[50:] + b"he", b"llo")):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.01)
            assert b"hello" in await reader.readuntil(b"ok")
        assert await answered((reader, writer))
        writer.close()

    play(scene)


def test_a_header_in_pieces_and_a_long_idle_connection_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        for byte in WHOLE:
            writer.write(bytes([byte]))
            await writer.drain()
        await reader.readuntil(b"ok")
        assert await answered((reader, writer))
        writer.close()

    play(scene)


def test_a_new_connection_takes_the_place_of_the_one_that_waited_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 3)

    async def scene(connect: Callable[[], Awaitable[Streams]]) -> None:
        used = await connect()
        waiting = [await connect() for _ in range(2)]
        for _, writer in waiting:
            writer.write(HALF)
        assert await answered(used)  # so it has waited for the shortest time
        new = [await connect() for _ in range(2)]
        assert await answered(new[1])
        for reader, _ in waiting:
            assert await ended(reader)
        assert await answered(used)
        assert await answered(new[0])
        for _, writer in (used, *waiting, *new):
            writer.close()

    play(scene)


def test_the_connections_stay_below_the_file_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((256, 128), (20, 1), (2**20, 2048), (resource.RLIM_INFINITY, 2048)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert connections.most_connections() == most


def test_a_place_in_the_code_logs_few_lines_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limit = 1000.0, RateLimit()
    monkeypatch.setattr(connections.time, "monotonic", lambda: now)

    def logged(line: int, word: str = "x") -> str | None:
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "file.py", line, "bad %s", (word,), None)
        return record.getMessage() if limit.filter(record) else None

    assert [logged(1, str(n)) for n in range(12)] == [*(f"bad {n}" for n in range(10)), None, None]
    assert logged(2) == "bad x"
    now += 60
    assert [logged(1), logged(1), logged(2)] == ["bad x (and 2 more before)", "bad x", "bad x"]


def test_four_hundred_half_sent_headers_with_few_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(run, files=256) as server, ExitStack() as stack:
        for _ in range(400):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))
            half.sendall(HALF)
        for _ in range(20):
            assert server.ask("GET", "/health")[0] == 200
            assert server.ask("POST", "/predict", {"text": "the lake"})[0] == 200
        assert server.stop() == 0
        assert server.process.stderr
        assert server.process.stderr.read() == ""
