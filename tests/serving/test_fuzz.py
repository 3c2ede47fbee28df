"""No body makes the service fail: what cannot be used gets a 4xx in the one form, and the schema tells no lies."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.serving.toy import RUN, Client, ToyEngine, running

from budgetformer.serving.app import make_app
from budgetformer.serving.settings import Settings

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install -e '.[dev]'")
checks = schemathesis.checks

# Two workers: so the app is ready when it has started.
SETTINGS = Settings(
    RUN, allowed_hosts=("*",), wait_ms=0, workers=2, max_texts=8, max_chars=200, max_bytes=12_000, timeout=3600
)
schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(ToyEngine(), SETTINGS))


@schema.parametrize()
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_answers_keep_to_the_schema(case: Any) -> None:
    case.call_and_validate(
        checks=[
            checks.not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
        ]
    )


BODIES = 10_000
AT_ONCE = 50
KEYS = ("text", "text_pair", "texts", "pairs", "budget", "top", "layer", "head", "extra", "", "\ud800", "ключ")
STRINGS = (
    "good film",
    "",
    " ",
    "\x00",
    "\ud800",
    "💥" * 9,
    "x" * 300,
    "learned",
    "fixed:0.5",
    "max:nan",
    "fixed:1e999",
)
RAW = (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"-0",
    b"[" * 5000,
    b'{"a":' * 3000,
    b'"\\ud800"',
    b'"\xed\xa0\x80"',
)
KINDS = (
    "application/json",
    "application/json; charset=utf-16",
    "text/plain",
    "",
    "application/x+json",
    "multipart/form-data",
)


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 6)
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(12))]
    if kind == 7:
        return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return (None, True, rng.choice(STRINGS), rng.choice(STRINGS), rng.randint(-(2**70), 2**70), rng.random())[kind]


def body(rng: random.Random) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(60))
    fields = {rng.choice(KEYS): value(rng) for _ in range(rng.randrange(5))}
    if kind == 1:
        fields = {"texts": [rng.choice(STRINGS) for _ in range(rng.randrange(10))], **fields}
    if kind == 2:
        fields = {"text": "good film", rng.choice(KEYS): value(rng)}
    raw = json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if kind == 3:
        at = rng.randrange(len(raw) + 1)
        raw = raw[:at] + rng.choice((b"", rng.randbytes(2), rng.choice(RAW))) + raw[at + rng.randrange(3) :]
    if kind == 4:
        raw = b'{"%b": %b}' % (rng.choice((b"text", b"texts", b"top", b"layer")), rng.choice(RAW))
    if kind == 5:
        raw = raw.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-8")))
    return raw


def test_ten_thousand_bad_bodies() -> None:
    rng = random.Random(0)
    seen: set[int] = set()

    async def one(client: Client) -> None:
        path = rng.choice(("/predict", "/predict", "/explain", "/attention"))
        raw, kind = body(rng), rng.choice(KINDS) if rng.random() < 0.1 else KINDS[0]
        pieces = [raw[: len(raw) // 2], raw[len(raw) // 2 :]] if rng.random() < 0.2 else raw
        status, _, answer = await client.send("POST", path, pieces, {"content-type": kind})
        seen.add(status)
        assert status in (200, 400, 413, 415, 422), (status, path, raw)
        if status != 200:
            assert set(json.loads(answer)["error"]) == {"code", "message", "hint"}

    async def main() -> None:
        async with running(make_app(ToyEngine(), SETTINGS)) as client:
            for _ in range(BODIES // AT_ONCE):
                await asyncio.gather(*(one(client) for _ in range(AT_ONCE)))

    asyncio.run(main())
    assert seen == {200, 400, 413, 415, 422}
