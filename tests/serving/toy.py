"""An engine without a model, and a client that speaks ASGI straight to the app."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tests.tables import make_table

from budgetformer import BudgetFormerConfig
from budgetformer.data.tokens import TokenTable
from budgetformer.dial import Dial
from budgetformer.engine.scores import Scores
from budgetformer.exits import AfterStage
from budgetformer.explain import Explainer
from budgetformer.serving.messages import Info
from budgetformer.serving.service import Engine, Text

RUN = Path("run")


class ToyEngine(Engine):
    """A token a word; a text that begins with "good" is good. While `gate` is closed, the model stands still."""

    def __init__(self, *, pairs: bool = False, fails: str = "") -> None:
        self.config = BudgetFormerConfig.preset("tiny").spec
        self.check = lambda dial: dial
        self.points, self.budget, self.budgets = {}, Dial(), ["learned", "full", "fixed:X", "max:X"]
        self.info = Info(
            model="0" * 16, task="single_label_classification", labels=["bad", "good"], pairs=pairs, layers=2, heads=4,
            max_tokens=16, budget="learned", budgets=self.budgets, slider=["learned", "full"], start=0,
        )  # fmt: skip
        self.fails = fails
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.batches: list[tuple[str, list[int]]] = []

    def encode(self, texts: Sequence[Text]) -> TokenTable:
        rows = []
        for first, second in texts:
            words = (first if second is None else f"{first} {second}").split()
            ids = [len(word) for word in words][: self.info.max_tokens]
            table = make_table(ids, [len(ids)], pair_start=[int(first.startswith("good"))])
            rows.append(replace(table, truncated=np.array([len(words) > self.info.max_tokens])))
        return TokenTable.join(rows)

    def score(self, table: TokenTable, dial: Dial, after: AfterStage | None = None) -> Scores:
        self.begun.set()
        self.gate.wait()
        if self.fails:
            raise ZeroDivisionError(self.fails)
        self.batches.append((str(dial), table.lengths.tolist()))
        chances = [[0.25, 0.75] if good else [0.75, 0.25] for good in table.pair_start]
        heads = np.array([[1, 2]] * len(table), np.int16)
        return Scores(table, self.info.task, 4, np.log(np.array(chances, np.float32)), heads, None, None)

    @cached_property
    def explainer(self) -> Explainer:
        return ToyExplainer()


class ToyExplainer(Explainer):
    """Explains without a model."""

    def __init__(self) -> None:
        pass

    def explain(self, text: str, text_pair: str | None = None, budget: str | Dial | None = None) -> dict[str, Any]:
        layer = {"s": 0.5, "k": 2, "relevance": [0.25] * 4, "weights": [0.5] * 4, "active": [True] * 4}
        return {
            "dial": str(budget), "tokens": text.split(), "joined": [], "parts": [], "cut": False, "label": "good",
            "probabilities": {}, "exit": None, "stages": [], "gated": True, "layers": [layer] * 2, "flops": {"used": 1},
        }  # fmt: skip

    def attention(
        self, text: str, text_pair: str | None, layer: int, head: int, budget: str | Dial | None = None
    ) -> dict[str, Any]:
        return {"dial": str(budget), "layer": layer, "head": head, "tokens": text.split(), "map": [[1.0]]}


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

        sent = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in sent.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
        }  # fmt: skip
        await self.app(scope, receive, send)
        start = out[0]
        received = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], received, b"".join(message.get("body", b"") for message in out[1:])

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
