"""Every answer of the service, by status and body, without a socket."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.serving.toy import RUN, Client, ToyEngine, running

from budgetformer.serving.app import KEY, make_app
from budgetformer.serving.settings import Settings

SMALL = Settings(RUN, wait_ms=0, queue=4, max_texts=3, max_chars=40, max_bytes=400, timeout=3600)
Scene = Callable[[Client], Awaitable[None]]


def play(scene: Scene, engine: ToyEngine | None = None, settings: Settings = SMALL, *, ready: bool = True) -> None:
    async def main() -> None:
        async with running(make_app(engine or ToyEngine(), settings), ready=ready) as client:
            await scene(client)

    asyncio.run(main())


def post(body: Any, engine: ToyEngine | None = None, path: str = "/predict", **more: Any) -> tuple[int, Any]:
    """The answer to one body, given as bytes or as an object."""
    result: list[Any] = []

    async def scene(client: Client) -> None:
        raw = body if isinstance(body, bytes | list) else json.dumps(body).encode()
        status, _, answer = await client.send("POST", path, raw, **more)
        result.extend((status, json.loads(answer)))

    play(scene, engine)
    return result[0], result[1]


def get(path: str, engine: ToyEngine | None = None, **more: Any) -> tuple[int, dict[str, str], bytes]:
    result: list[tuple[int, dict[str, str], bytes]] = []

    async def scene(client: Client) -> None:
        result.append(await client.send("GET", path, **more))

    play(scene, engine)
    return result[0]


def good(tokens: int = 2) -> dict[str, Any]:
    return {
        "label": "good", "score": 0.75, "probabilities": {"good": 0.75, "bad": 0.25},
        "heads": {"used": 3, "possible": 8}, "tokens": tokens, "cut": False,
    }  # fmt: skip


def test_a_client_that_leaves_during_its_upload_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[dict[str, Any]] = []

    async def main() -> None:
        async def receive() -> dict[str, str]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            answers.append(message)

        app = make_app(ToyEngine(), SMALL)
        async with running(app) as client:
            headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"9")]
            scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers, "query_string": b""}
            await app(scope, receive, send)
            _, _, metrics = await client.send("GET", "/metrics")
            assert b'"499"' in metrics

    asyncio.run(main())
    assert answers[0]["status"] == 499
    assert caplog.records == []


def test_one_text() -> None:
    answer = {"predictions": [good()], "model": "0" * 16, "budget": "learned"}
    assert post({"text": "good film"}) == (200, answer)


def test_several_texts_in_order_with_a_dial_and_the_likeliest_labels() -> None:
    engine = ToyEngine()
    status, answer = post({"texts": ["bad", "good " * 6, "good it is"], "budget": "max:0.50", "top": 1}, engine)
    assert status == 200
    assert answer["budget"] == "max:0.5"
    assert [p["probabilities"] for p in answer["predictions"]] == [{"bad": 0.75}, {"good": 0.75}, {"good": 0.75}]
    assert [p["tokens"] for p in answer["predictions"]] == [1, 6, 3]
    assert {dial for dial, _ in engine.batches[1:]} == {"max:0.5"}


def test_a_text_above_the_models_length_is_cut_and_says_so() -> None:
    (prediction,) = post({"text": "a " * 20})[1]["predictions"]
    assert (prediction["cut"], prediction["tokens"]) == (True, 16)


def test_pairs() -> None:
    engine = ToyEngine(pairs=True)
    assert post({"text": "good", "text_pair": "film it is"}, engine)[1]["predictions"] == [good(4)]
    assert post({"pairs": [["good", "film"]]}, engine)[1]["predictions"] == [good(2)]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "invalid_text"),
        (7, "invalid_text"),
        (["good", "film"], "invalid_text"),
        ("", "empty_text"),
        (" \n", "empty_text"),
        ("x" * 41, "text_too_long"),
        ("half \ud800", "invalid_text"),
    ],
)
def test_a_bad_text_in_a_list_fails_alone(text: Any, code: str) -> None:
    status, answer = post({"texts": ["good film", text, "good it is"]})
    assert status == 200
    assert answer["predictions"][::2] == [good(2), good(3)]
    assert answer["predictions"][1]["error"]["code"] == code
    assert set(answer["predictions"][1]["error"]) == {"code", "message", "hint"}


@pytest.mark.parametrize("pair", [["good"], ["a", "b", "c"], ["a", 1], "ab", None, ["", "b"], ["a", "x" * 41]])
def test_a_bad_pair_in_a_list_fails_alone(pair: Any) -> None:
    status, answer = post({"pairs": [["good", "film"], pair]}, ToyEngine(pairs=True))
    assert status == 200
    assert answer["predictions"][0] == good(2)
    assert "error" in answer["predictions"][1]


def test_a_list_of_bad_texts_needs_no_model() -> None:
    engine = ToyEngine()
    assert post({"texts": ["", " "]}, engine)[0] == 200
    assert len(engine.batches) == 1  # the self-test's


WRONG = [
    (b"", 422, "invalid_request", "Field required"),
    (b"{", 400, "invalid_json", "from character 1"),
    (b'{"text": "\xff"}', 400, "invalid_json", "JSON"),
    (b"[" * 300, 400, "invalid_json", "JSON"),
    (b'{"text": ' + b"1" * 350 + b"}", 422, "invalid_request", "text: "),
    (b'{"text": NaN}', 422, "invalid_request", "text: Input should be a valid string"),
    (b'{"text": "good", "top": 1e999}', 422, "invalid_request", "top: "),
    (b'{"text": "\\ud800"}', 422, "invalid_text", "surrogate"),
    (b'{"text": "good", "\\ud800": 1}', 422, "invalid_request", "unicode"),
    (b"null", 422, "invalid_request", "the body: "),
    ([1, 2], 422, "invalid_request", "the body: "),
    ({}, 422, "invalid_request", "exactly one of text, texts and pairs"),
    ({"text": "a", "texts": ["b"]}, 422, "invalid_request", "exactly one of text, texts and pairs"),
    ({"texts": ["a"], "text_pair": "b"}, 422, "invalid_request", "text_pair with text only"),
    ({"texts": []}, 422, "invalid_request", "texts is empty"),
    ({"texts": "good"}, 422, "invalid_request", "texts: Input should be a valid list"),
    ({"texts": ["a"] * 4}, 422, "too_many_texts", "texts holds 4, and 3 are allowed"),
    ({"text": "x" * 41}, 422, "text_too_long", "41 characters, and 40 are allowed"),
    ({"text": ""}, 422, "empty_text", "empty or blank"),
    ({"text": "good", "budget": "half"}, 422, "invalid_budget", "budget"),
    ({"text": "good", "budget": "fixed:nan"}, 422, "invalid_budget", "budget"),
    ({"text": "good", "budget": "random"}, 422, "invalid_budget", "budget"),
    ({"text": "good", "budget": 1}, 422, "invalid_request", "budget: "),
    ({"text": "good", "top": 0}, 422, "invalid_request", "top: "),
    ({"text": "good", "top": True}, 422, "invalid_request", "top: "),
    ({"text": "good", "tpo": 1}, 422, "invalid_request", "tpo: Extra inputs"),
]


@pytest.mark.parametrize(("body", "status", "code", "message"), WRONG)
def test_a_wrong_body_is_refused_in_one_form(body: Any, status: int, code: str, message: str) -> None:
    raw = json.dumps(body).encode() if isinstance(body, list) else body
    result, answer = post(raw)
    assert result == status
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"code", "message", "hint"}
    assert answer["error"]["code"] == code
    assert message in answer["error"]["message"]
    assert answer["error"]["hint"]


def test_a_model_that_reads_pairs_or_none_says_so() -> None:
    assert post({"text": "good"}, ToyEngine(pairs=True))[1]["error"]["code"] == "pair_needed"
    assert post({"text": "good", "text_pair": "film"}, ToyEngine(pairs=False))[1]["error"]["code"] == "no_pairs"


def test_a_body_must_be_declared_as_json() -> None:
    status, answer = post({"text": "good"}, headers={"content-type": "text/plain"})
    assert (status, answer["error"]["code"]) == (415, "not_json")


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_refused_while_it_is_read(declared: bool) -> None:
    chunks = [b'{"text": "', *[b"x" * 100] * 10, b'"}']
    headers = {"content-length": "1012"} if declared else {"transfer-encoding": "chunked"}

    async def scene(client: Client) -> None:
        status, result, answer = await client.send("POST", "/predict", chunks, headers)
        assert (status, result["connection"]) == (413, "close")
        assert json.loads(answer)["error"]["code"] == "body_too_large"
        assert "400 bytes" in json.loads(answer)["error"]["message"]

    play(scene)


def test_unknown_paths_and_methods() -> None:
    status, _, answer = get("/nothing")
    assert (status, json.loads(answer)["error"]["code"]) == (404, "not_found")
    status, headers, answer = get("/predict")
    assert (status, headers["allow"], json.loads(answer)["error"]["code"]) == (405, "POST", "method_not_allowed")


def test_info_names_labels_limits_and_dials() -> None:
    info = json.loads(get("/info")[2])
    assert info["labels"] == ["bad", "good"]
    assert info["limits"] == {"max_texts": 3, "max_chars": 40, "max_bytes": 400, "timeout": 3600, "queue": 4}
    assert info["budgets"] == ["learned", "full", "fixed:X", "max:X"]
    assert (info["model"], info["layers"], info["heads"], info["max_tokens"]) == ("0" * 16, 2, 4, 16)


def test_ready_comes_after_the_self_test() -> None:
    engine = ToyEngine()
    engine.gate.clear()

    async def scene(client: Client) -> None:
        assert (await client.send("GET", "/health"))[0] == 200
        for method, path in (("GET", "/ready"), ("POST", "/predict")):
            status, headers, answer = await client.send(method, path, b'{"text": "good"}')
            assert (status, json.loads(answer)["error"]["code"]) == (503, "not_ready")
            assert headers["retry-after"] == "1"
        engine.gate.set()
        while (await client.send("GET", "/ready"))[0] != 200:
            await asyncio.sleep(0)
        assert (await client.json("/predict", {"text": "good"}))[0] == 200

    play(scene, engine, ready=False)


def test_a_failed_self_test_is_never_ready(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(client: Client) -> None:
        while "self-test failed" not in (await client.send("GET", "/ready"))[2].decode():
            await asyncio.sleep(0)
        assert (await client.send("GET", "/ready"))[0] == 503

    play(scene, ToyEngine(fails="broken weights"), ready=False)
    assert "broken weights" in caplog.text


def test_a_fault_is_answered_in_the_same_form_and_no_text_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = ToyEngine()
    caplog.set_level(logging.DEBUG)

    async def scene(client: Client) -> None:
        engine.fails = "secret words"
        status, answer = await client.json("/predict", {"text": "secret words"})
        assert (status, answer["error"]["code"]) == (500, "internal")
        for body in (b'{"text": "secret words', b'{"secret words": 1}', b'"secret words"'):
            assert (await client.send("POST", "/predict", body))[0] in (400, 422)

    play(scene, engine)
    assert "ZeroDivisionError" in caplog.text
    assert "secret" not in caplog.text


def test_a_full_service_answers_503_and_soon_takes_work_again() -> None:
    engine = ToyEngine()

    async def scene(client: Client) -> None:
        engine.gate.clear()
        held = [asyncio.create_task(client.json("/predict", {"texts": ["good film"] * 2})) for _ in range(2)]
        while b"budgetformer_queue_texts 4.0" not in (await client.send("GET", "/metrics"))[2]:
            await asyncio.sleep(0)
        status, headers, answer = await client.send("POST", "/predict", b'{"text": "good"}')
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(answer)["error"]["code"] == "queue_full"
        engine.gate.set()
        assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
        assert (await client.json("/predict", {"text": "good"}))[0] == 200

    play(scene, engine)


def test_a_request_that_does_not_fit_beside_the_others_is_refused() -> None:
    engine = ToyEngine()

    async def scene(client: Client) -> None:
        engine.gate.clear()
        held = asyncio.create_task(client.json("/predict", {"texts": ["good film"] * 3}))
        while b"budgetformer_queue_texts 3.0" not in (await client.send("GET", "/metrics"))[2]:
            await asyncio.sleep(0)
        assert (await client.json("/predict", {"texts": ["good"] * 2}))[1]["error"]["code"] == "queue_full"
        engine.gate.set()
        assert (await held)[0] == 200

    play(scene, engine)


def test_a_client_that_leaves_frees_its_place_and_its_text_is_not_run() -> None:
    engine = ToyEngine()

    async def scene(client: Client) -> None:
        held = await client.hold(engine)
        gone = asyncio.Event()
        left = asyncio.create_task(client.json("/predict", {"texts": ["one two three"] * 3}, gone=gone))
        while b"budgetformer_queue_texts 4.0" not in (await client.send("GET", "/metrics"))[2]:
            await asyncio.sleep(0)
        gone.set()
        assert (await left)[0] == 499
        later = asyncio.create_task(client.json("/predict", {"texts": ["good it is so"] * 3}))
        engine.gate.set()
        assert (await held)[0] == (await later)[0] == 200
        assert 3 not in [tokens for _, batch in engine.batches for tokens in batch]

    play(scene, engine)


def test_time_runs_out_with_504_and_work_not_begun_is_dropped() -> None:
    engine = ToyEngine()

    async def scene(client: Client) -> None:
        engine.gate.clear()
        engine.begun.clear()
        while not engine.begun.is_set():  # a busy machine may not begin it in time
            assert (await client.json("/predict", {"text": "good film"}))[0] == 504
        status, answer = await client.json("/predict", {"text": "one two three"})
        assert (status, answer["error"]["code"]) == (504, "timeout")
        engine.gate.set()

    play(scene, engine, Settings(RUN, wait_ms=0, timeout=0.01))
    assert 3 not in [tokens for _, batch in engine.batches for tokens in batch]


def test_a_client_that_does_not_read_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(client: Client) -> None:
        inner, stuck = client.app, asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def never(message: Any) -> None:
                await send(message)
                if message["type"] == "http.response.body":
                    await stuck.wait()

            await inner(scope, receive, never)

        for _ in range(3):  # one more than the queue holds
            assert (await Client(app).json("/predict", {"text": "good"}))[0] == 200
        assert (await client.json("/predict", {"text": "good"}))[0] == 200

    play(scene, settings=Settings(RUN, wait_ms=0, queue=2, max_texts=2, timeout=0.5))
    assert "TimeoutError at /predict" in caplog.text


def test_a_body_that_never_comes_is_given_up() -> None:
    async def scene(client: Client) -> None:
        status, headers, answer = await client.send("POST", "/predict", [])
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(answer)["error"]["code"] == "request_timeout"

    play(scene, settings=Settings(RUN, timeout=0.01))


def test_bodies_on_their_way_take_places_too() -> None:
    async def scene(client: Client) -> None:
        gone = asyncio.Event()
        slow = [asyncio.create_task(client.send("POST", "/predict", [], gone=gone)) for _ in range(4)]
        await asyncio.sleep(0)
        assert (await client.json("/predict", {"text": "good"}))[1]["error"]["code"] == "queue_full"
        gone.set()
        await asyncio.gather(*slow)
        assert (await client.json("/predict", {"text": "good"}))[0] == 200

    play(scene)


def test_the_key_guards_all_but_health_and_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "s3cret-é")

    async def scene(client: Client) -> None:
        for path in ("/health", "/ready"):
            assert (await client.send("GET", path))[0] == 200
        for path in ("/info", "/metrics", "/openapi.json", "/nothing"):
            status, headers, answer = await client.send("GET", path)
            assert (status, headers["www-authenticate"]) == (401, 'Bearer, Basic realm="budgetformer"')
            assert json.loads(answer)["error"]["code"] == "unauthorized"
        key = "s3cret-é".encode().decode("latin-1")
        basic = base64.b64encode("any:s3cret-é".encode()).decode()
        for headers in (
            {"Authorization": f"Basic {basic}"},
            {"Authorization": f"Bearer {key}"},
            {"authorization": f"bearer  {key}"},
            {"X-API-Key": key},
        ):
            assert (await client.send("POST", "/predict", b'{"text": "good"}', headers))[0] == 200
        for headers in ({"Authorization": f"Basic {key}"}, {"Authorization": "Bearer "}, {"X-API-Key": "s3cret"}):
            assert (await client.send("POST", "/predict", b'{"text": "good"}', headers))[0] == 401

    play(scene)


@pytest.mark.parametrize(
    ("host", "allowed", "refused"),
    [
        ("127.0.0.1", ["127.0.0.1", "127.0.0.1:8000", "LOCALHOST:1", "[::1]:8000", "Good.example:80"],
         ["rebound.example", "192.168.1.5", "[::1", "127.0.0.1.rebound.example", "localhost.rebound.example"]),
        ("192.168.1.5", ["192.168.1.5:8000", "good.example"], ["192.168.1.6", "localhost", "rebound.example"]),
        ("0.0.0.0", ["192.168.1.6", "localhost", "[fe80::1]", "good.example"], ["rebound.example", "0x7f000001"]),
    ],
)  # fmt: skip
def test_without_a_key_a_request_must_address_the_service(host: str, allowed: list[str], refused: list[str]) -> None:
    async def scene(client: Client) -> None:
        for names, status in ((allowed, 200), (refused, 403)):
            for name in names:
                assert (await client.send("GET", "/info", headers={"host": name}))[0] == status, name
        for path in ("/health", "/ready"):
            assert (await client.send("GET", path, headers={"host": refused[0]}))[0] == 200

    play(scene, settings=Settings(RUN, host=host, allowed_hosts=("good.example",)))


def test_with_a_key_or_a_star_any_host_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(client: Client) -> None:
        assert (await client.send("GET", "/info", headers={"host": "any.example", "x-api-key": "k"}))[0] == 200

    play(scene, settings=Settings(RUN, allowed_hosts=("*",)))
    monkeypatch.setenv(KEY, "k")
    play(scene)


def test_metrics_count_requests_heads_cuts_and_refusals() -> None:
    async def scene(client: Client) -> None:
        await client.json("/predict", {"texts": ["good film", "a " * 18]})
        await client.json("/predict", {"text": ""})
        await client.send("GET", "/secret-path")
        page = (await client.send("GET", "/metrics"))[2].decode()
        for line in (
            'budgetformer_requests_total{code="200",path="/predict"} 1.0',
            'budgetformer_requests_total{code="404",path="other"} 1.0',
            'budgetformer_request_seconds_count{path="/predict"} 2.0',
            'budgetformer_refusals_total{code="empty_text"} 1.0',
            "budgetformer_texts_cut_total 1.0",
            "budgetformer_texts_total 2.0",
            "budgetformer_heads_used_total 6.0",
            "budgetformer_heads_possible_total 16.0",
            "budgetformer_queue_texts 0.0",
        ):
            assert line in page
        assert "secret" not in page

    play(scene)
