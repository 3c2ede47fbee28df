"""An engine without a model, and a client that speaks ASGI straight to the app."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.tables import make_table

from budgetformer.nn.allocation import Dial
from budgetformer.serving.engine import Engine, Result, Text, Work
from budgetformer.serving.settings import DIALS

RUN = Path("run")


class ToyEngine(Engine):
    """A token a word; a text that begins with "good" is good. While `gate` is closed, the model stands still."""

    def __init__(self, *, pairs: bool | None = None, fails: str = "") -> None:
        self.task, self.labels, self.max_tokens = "single_label_classification", ["bad", "good"], 16
        self.layers, self.heads, self.possible = 2, 4, 8
        self.pairs, self.hash, self.budget = pairs, "0" * 16, Dial()
        self.points, self.dials = {}, DIALS
        self.fails = fails
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.batches: list[tuple[str, list[int]]] = []

    def encode(self, texts: Sequence[Text]) -> list[Work]:
        pieces = []
        for first, second in texts:
            words = (first if second is None else f"{first} {second}").split()
            ids = [len(word) for word in words][: self.max_tokens]
            table = make_table(ids, [len(ids)], pair_start=[int(first.startswith("good"))])
            pieces.append(Work(replace(table, truncated=np.array([len(words) > self.max_tokens]))))
        return pieces

    def run(self, pieces: Sequence[Work], dial: Dial) -> list[Result]:
        self.begun.set()
        self.gate.wait()
        if self.fails:
            raise ZeroDivisionError(self.fails)
        self.batches.append((str(dial), [piece.tokens for piece in pieces]))
        return [
            Result(np.array([0.25, 0.75] if piece.table.pair_start[0] else [0.75, 0.25], np.float32), 3)
            for piece in pieces
        ]

    def explain(self, text: Text, dial: Dial) -> dict[str, Any]:
        layer = {"s": 0.5, "k": 2, "relevance": [0.25] * 4, "weights": [0.5] * 4, "active": [True] * 4}
        return {
            "dial": str(dial), "tokens": text[0].split(), "joined": [], "parts": [], "cut": False, "label": "good",
            "probabilities": {}, "gated": True, "layers": [layer] * 2, "flops": {"used": 1},
        }  # fmt: skip

    def attention(self, text: Text, dial: Dial, layer: int, head: int) -> dict[str, Any]:
        return {"dial": str(dial), "layer": layer, "head": head, "tokens": text[0].split(), "map": [[1.0]]}


class Client:
    """Sends one request at a time into an ASGI app."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def hold(self, engine: ToyEngine) -> asyncio.Task[tuple[int, Any]]:
        """Stop the model in the middle of a text of two tokens."""
        engine.gate.clear()
        engine.begun.clear()
        held = asyncio.create_task(self.json("/predict", {"text": "good film"}))
        await asyncio.to_thread(engine.begun.wait)
        return held

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | Sequence[bytes] = b"",
        headers: dict[str, str] | None = None,
        gone: asyncio.Event | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer. `gone` tells the app that the client has left."""
        chunks = [body] if isinstance(body, bytes) else list(body)
        incoming = [
            {"type": "http.request", "body": chunk, "more_body": i < len(chunks) - 1} for i, chunk in enumerate(chunks)
        ]
        out: list[dict[str, Any]] = []
        left = gone or asyncio.Event()

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop(0)
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            out.append(message)

        given = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
        }  # fmt: skip
        await self.app(scope, receive, send)
        start = out[0]
        found = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], found, b"".join(message.get("body", b"") for message in out[1:])

    async def json(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        """POST an object; status and the parsed answer."""
        status, _, answer = await self.send("POST", path, json.dumps(body).encode(), **more)
        return status, json.loads(answer)


@asynccontextmanager
async def running(app: Any, *, ready: bool = True) -> AsyncIterator[Client]:
    """A client of the app between its start-up and its shutdown."""
    async with app.router.lifespan_context(app):
        client = Client(app)
        while ready and (await client.send("GET", "/ready"))[0] == 503:
            await asyncio.sleep(0)
        yield client
