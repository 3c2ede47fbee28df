"""The routes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from budgetformer import __version__
from budgetformer.data.tokens import TextError
from budgetformer.errors import UsageError
from budgetformer.explain import page as explain_page
from budgetformer.nn.allocation import Dial
from budgetformer.serving.engine import Engine, Text
from budgetformer.serving.messages import (
    AttentionMap,
    Explanation,
    HeadBody,
    Info,
    PredictBody,
    Predictions,
    Refusal,
    Status,
    TextBody,
    responses,
)
from budgetformer.serving.middleware import Border
from budgetformer.serving.service import Service
from budgetformer.serving.settings import Settings

KEY = "BUDGETFORMER_API_KEY"
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_WORK = responses(400, 401, 408, 413, 415, 422, 500, 503, 504)
_LOOK = responses(401, 500)
_HINT = "/openapi.json describes the fields, /info the limits"


def make_app(engine: Engine, settings: Settings) -> FastAPI:
    """The service's ASGI app; its API key comes from the environment."""
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(service.start())
        if settings.workers > 1:  # nobody can choose the worker, so none that is not ready may be met
            await starting
        yield
        await starting
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="budgetformer", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        description="Text classification that computes only the attention heads each text needs.",
    )  # fmt: skip
    app.add_middleware(Border, service=service, key=os.environ.get(KEY))
    _errors(app, service)
    _looks(app, service)
    _work(app, service)
    return app


def _looks(app: FastAPI, service: Service) -> None:
    """The routes that need no model."""
    html = explain_page()

    @app.get("/", responses=_LOOK, response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """The page that shows which heads a text runs."""
        return HTMLResponse(html, headers={"Content-Security-Policy": _POLICY})

    @app.get("/health", responses=responses(500))
    async def health() -> Status:
        """The process lives."""
        return Status(status="ok")

    @app.get("/ready", responses=responses(500, 503))
    async def ready() -> Status:
        """The model is loaded and its self-test has passed."""
        service.check_ready()
        return Status(status="ready")

    @app.get("/info", responses=_LOOK)
    async def info() -> Info:
        """What is served, and what it accepts."""
        engine, settings = service.engine, service.settings
        limits = {name: asdict(settings)[name] for name in ("max_texts", "max_chars", "max_bytes", "timeout", "queue")}
        return Info(
            model=engine.hash, task=engine.task, labels=engine.labels, pairs=engine.pairs, layers=engine.layers,
            heads=engine.heads, max_tokens=engine.max_tokens, budget=str(engine.budget), budgets=_budgets(engine),
            limits=limits,
            version=__version__,
        )  # fmt: skip

    @app.get("/metrics", responses={**_LOOK, 200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _work(app: FastAPI, service: Service) -> None:
    """The routes that go through the model's thread."""

    @app.post("/predict", responses=_WORK, response_model=Predictions)
    async def predict(body: PredictBody, request: Request) -> JSONResponse:
        """Classify one text or several; in a list, a text that cannot be used has an error in its place."""
        dial = _dial(body.budget, service)
        checked = [_check(text, service) for text in _given(body, service.settings)]
        if body.text is not None and isinstance(checked[0], Refusal):
            raise checked[0]
        good = [text for text in checked if not isinstance(text, Refusal)]
        found = iter(await service.predict(request, good, dial) if good else ())
        predictions = [
            text.body if isinstance(text, Refusal) else service.engine.render(*next(found), body.top)
            for text in checked
        ]
        return JSONResponse({"predictions": predictions, "model": service.engine.hash, "budget": str(dial)})

    @app.post("/explain", responses=_WORK, response_model=Explanation)
    async def explain(body: TextBody, request: Request) -> Response:
        """Which heads a text runs, why, and what they cost."""
        text, dial = _one(body, service), _dial(body.budget, service)
        return _json(await service.call(request, lambda: json.dumps(service.engine.explain(text, dial))))

    @app.post("/attention", responses=_WORK, response_model=AttentionMap)
    async def attention(body: HeadBody, request: Request) -> Response:
        """Where one head looks in a text, also if it did not run."""
        text, dial, engine = _one(body, service), _dial(body.budget, service), service.engine
        if body.layer >= engine.layers or body.head >= engine.heads:
            message = f"the model has {engine.layers} layers of {engine.heads} heads, counted from 0"
            raise Refusal(422, "no_such_head", message, "give a layer and a head that exist")
        look = partial(engine.attention, text, dial, body.layer, body.head)
        return _json(await service.call(request, lambda: json.dumps(look())))


def _given(body: PredictBody, settings: Settings) -> list[Any]:
    """The texts of a request, each a text or a pair, unchecked."""
    given = [name for name in ("text", "texts", "pairs") if getattr(body, name) is not None]
    if len(given) != 1 or (body.text_pair is not None and given != ["text"]):
        raise _invalid("give exactly one of text, texts and pairs, and text_pair with text only")
    if body.text is not None:
        return [body.text if body.text_pair is None else [body.text, body.text_pair]]
    texts: list[Any] = getattr(body, given[0])
    if not texts:
        raise _invalid(f"{given[0]} is empty: give at least one")
    if len(texts) > settings.max_texts:
        raise Refusal(
            422, "too_many_texts", f"{given[0]} holds {len(texts)}, and {settings.max_texts} are allowed",
            "split them over several requests",
        )  # fmt: skip
    if given == ["pairs"]:
        return [pair if isinstance(pair, list) and len(pair) == 2 else None for pair in texts]
    return [text if isinstance(text, str) else None for text in texts]


def _one(body: TextBody, service: Service) -> Text:
    """The text of a request about one text."""
    checked = _check(body.text if body.text_pair is None else [body.text, body.text_pair], service)
    if isinstance(checked, Refusal):
        raise checked
    return checked


def _json(dumped: str) -> Response:
    return Response(dumped, media_type="application/json")


def _check(given: Any, service: Service) -> Text | Refusal:
    """A text or pair that the model can read, or what is wrong with it. Messages never hold the text."""
    pairs = service.engine.pairs
    parts = given if isinstance(given, list) else [given]
    if not all(isinstance(part, str) for part in parts):
        wanted = "a pair of two strings" if pairs else "a string"
        return Refusal(422, "invalid_text", "this text is no string or pair of strings", f"give {wanted}")
    if pairs is not None and (len(parts) == 2) != pairs:
        if pairs:
            return Refusal(422, "pair_needed", "the model reads pairs of texts", "give pairs, or text and text_pair")
        return Refusal(422, "no_pairs", "the model reads single texts", "give text or texts")
    for part in parts:
        if len(part) > service.settings.max_chars:
            message = f"the text has {len(part)} characters, and {service.settings.max_chars} are allowed"
            return Refusal(422, "text_too_long", message, "shorten or split it")
        if not part or part.isspace():
            return Refusal(422, "empty_text", "the text is empty or blank", "give at least one word")
        try:
            part.encode()
        except UnicodeEncodeError:
            return Refusal(422, "invalid_text", "the text holds half of a surrogate pair", "send valid Unicode")
    return parts[0], parts[1] if len(parts) == 2 else None


def _dial(given: str | None, service: Service) -> Dial:
    try:
        return service.engine.budget if given is None else service.engine.dial(given)
    except UsageError:
        hint = f"give one of {', '.join(_budgets(service.engine))}; X is from 0 to 1"
        raise Refusal(422, "invalid_budget", "the budget is not known", hint) from None


def _budgets(engine: Engine) -> list[str]:
    """What a request may give: dials, and the run's operating points by name."""
    return [*(name if name in ("learned", "full") else f"{name}:X" for name in engine.dials), *engine.points]


def _invalid(message: str) -> Refusal:
    return Refusal(422, "invalid_request", message, _HINT)


def _errors(app: FastAPI, service: Service) -> None:
    """Every error in one form."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        if not isinstance(error, Refusal):
            code, message, hint = {
                400: ("invalid_json", "the body cannot be read as JSON", "send UTF-8 JSON, not nested deeply"),
                404: ("not_found", "there is no such path", "/openapi.json lists the paths"),
                405: ("method_not_allowed", "the path has another method", "the header Allow names it"),
            }.get(error.status_code, ("refused", "the request cannot be answered", _HINT))
            error = Refusal(error.status_code, code, message, hint, dict(error.headers or {}))
        return service.answer(error)

    @app.exception_handler(TextError)
    async def unreadable(request: Request, error: TextError) -> Response:
        return service.answer(Refusal(422, "invalid_text", f"text {error.row} has no token", "give at least one word"))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            message = f"the body is not JSON, from character {first['loc'][-1]} on"
            return service.answer(Refusal(400, "invalid_json", message, "send UTF-8 JSON"))
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not kind.endswith("json"):
            message = "the body is not declared as JSON"
            return service.answer(Refusal(415, "not_json", message, "send Content-Type: application/json"))
        field = ".".join(str(part) for part in first["loc"][1:]) or "the body"
        return service.answer(_invalid(f"{ascii(field[:60])[1:-1]}: {first['msg']}"))
