"""The routes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from budgetformer import __version__
from budgetformer.data.tokens import TextError
from budgetformer.dial import Dial
from budgetformer.errors import UsageError
from budgetformer.explain import page as explain_page
from budgetformer.serving import messages
from budgetformer.serving.messages import HeadBody, PredictBody, Refusal, TextBody, client_closed, responses
from budgetformer.serving.middleware import Admission
from budgetformer.serving.service import Engine, Service, Text
from budgetformer.serving.settings import KEY, Settings

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Body = TypeVar("Body", bound=BaseModel)
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
        description="Text classification that spends on each text only what it needs: words, layers, attention heads.",
    )  # fmt: skip
    app.state.pairs = engine.info.pairs
    _errors(app, service)
    _looks(app, service)
    predict = _work(app, service)
    app.add_middleware(Admission, service=service, key=os.environ.get(KEY), direct={"/predict": predict})
    return app


def _looks(app: FastAPI, service: Service) -> None:
    """The routes that need no model."""
    html = explain_page()

    @app.get("/", responses=_LOOK, response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """The page that shows which heads a text runs."""
        return HTMLResponse(html, headers={"Content-Security-Policy": _POLICY})

    @app.get("/health", responses=responses(500))
    async def health() -> dict[str, str]:
        """The process lives."""
        return {"status": "ok"}

    @app.get("/ready", responses=responses(500, 503))
    async def ready() -> dict[str, str]:
        """The model is loaded and its self-test has passed."""
        service.check_ready()
        return {"status": "ready"}

    @app.get("/info", responses=_LOOK)
    async def info() -> messages.Info:
        """What is served, and what it accepts."""
        names = ("max_texts", "max_chars", "max_bytes", "timeout", "queue")
        limits = {name: getattr(service.settings, name) for name in names}
        return service.engine.info.model_copy(update={"limits": limits})

    @app.get("/metrics", responses={**_LOOK, 200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _work(app: FastAPI, service: Service) -> ASGIApp:
    """The routes that go through the model's thread. -> /predict without FastAPI around it"""
    engine = service.engine

    @app.post("/predict", responses=_WORK, response_model=messages.Predictions)
    async def predict(body: PredictBody, request: Request) -> JSONResponse:
        """Classify one text or several; in a list, a text that cannot be used has an error in its place."""
        items, most = body.items(), service.settings.max_texts
        if len(items) > most:
            message = f"{'pairs' if body.pairs else 'texts'} holds {len(items)}, and {most} are allowed"
            raise Refusal(422, "too_many_texts", message, "split them over several requests")
        checked, dial = [_check(item, service) for item in items], _dial(body.budget, engine)
        if body.text is not None and isinstance(checked[0], Refusal):
            raise checked[0]
        good = [text for text in checked if not isinstance(text, Refusal)]
        answers = iter(await service.predict(request, good, dial, body.deadline_ms) if good else ())
        predictions: list[dict[str, Any]]
        predictions = [text.body if isinstance(text, Refusal) else next(answers) for text in checked]
        if body.text is not None and "error" in predictions[0]:
            raise messages.too_late()
        for prediction in predictions:
            if body.deadline_ms is not None and "error" not in prediction:
                prediction.setdefault("deadline", False)
            if body.top is not None and "probabilities" in prediction:
                prediction["probabilities"] = dict(islice(prediction["probabilities"].items(), body.top))
        return JSONResponse({"predictions": predictions, "model": engine.info.model, "budget": str(dial)})

    async def look(body: TextBody, request: Request, function: Callable[..., Any], *place: int) -> Response:
        checked, dial = _check(body.items()[0], service), _dial(body.budget, engine)
        if isinstance(checked, Refusal):
            raise checked
        dumped = await service.call(request, lambda: json.dumps(function(*checked, *place, budget=dial)))
        return Response(dumped, media_type="application/json")

    @app.post("/explain", responses=_WORK, response_model=messages.Explanation)
    async def explain(body: TextBody, request: Request) -> Response:
        """Which heads a text runs, why, and what they cost."""
        return await look(body, request, engine.explainer.explain)

    @app.post("/attention", responses=_WORK, response_model=messages.AttentionMap)
    async def attention(body: HeadBody, request: Request) -> Response:
        """Where one head looks in a text, also if it did not run."""
        if body.layer >= engine.info.layers or body.head >= engine.info.heads:
            message = f"the model has {engine.info.layers} layers of {engine.info.heads} heads, counted from 0"
            raise Refusal(422, "no_such_head", message, "give a layer and a head that exist")
        return await look(body, request, engine.explainer.attention, body.layer, body.head)

    return _direct(predict, PredictBody)


def _direct(endpoint: Callable[[Body, Request], Awaitable[Response]], model: type[Body]) -> ASGIApp:
    """An endpoint as FastAPI would run it, in half of its time: routing, dependencies and exit stacks take the rest."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await endpoint(_read(model, await request.body(), _media_type(request)), request)
        except (HTTPException, TextError, RequestValidationError) as error:
            raise _refusal(request, error) from None
        except ClientDisconnect:
            raise client_closed() from None
        await response(scope, receive, send)

    return app


def _read(model: type[Body], raw: bytes, media_type: str) -> Body:
    """A request's body as FastAPI reads it, with its errors."""
    if not raw:
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "Field required"}])
    fields: Any = raw
    kind, _, subtype = media_type.partition("/")
    if kind == "application" and (subtype == "json" or subtype.endswith("+json")):
        try:
            fields = json.loads(raw)
        except json.JSONDecodeError as error:
            raise RequestValidationError([{"type": "json_invalid", "loc": ("body", error.pos)}]) from None
        except (ValueError, RecursionError):
            raise HTTPException(400) from None
    try:
        return model.model_validate(fields, from_attributes=True)
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _check(parts: list[Any], service: Service) -> Text | Refusal:
    """A text or pair that the model can read, or what is wrong with it. Messages never hold the text."""
    pairs, most = service.engine.info.pairs, service.settings.max_chars
    if not all(isinstance(part, str) for part in parts):
        hint = f"give {'a pair of two strings' if pairs else 'a string'}"
        return Refusal(422, "invalid_text", "this text is no string or pair of strings", hint)
    if pairs and len(parts) == 1:
        return Refusal(422, "pair_needed", "the model reads pairs of texts", "give pairs, or text and text_pair")
    if not pairs and len(parts) == 2:
        return Refusal(422, "no_pairs", "the model reads single texts", "give text or texts")
    for part in parts:
        if len(part) > most:
            message = f"the text has {len(part)} characters, and {most} are allowed"
            return Refusal(422, "text_too_long", message, "shorten or split it")
        if not part or part.isspace():
            return Refusal(422, "empty_text", "the text is empty or blank", "give at least one word")
        try:
            part.encode()
        except UnicodeEncodeError:
            return Refusal(422, "invalid_text", "the text holds half of a surrogate pair", "send valid Unicode")
    return parts[0], parts[1] if pairs else None


def _dial(budget: str | None, engine: Engine) -> Dial:
    try:
        return engine.budget if budget is None else engine.dial(budget)
    except UsageError:
        hint = f"give one of {', '.join(engine.info.budgets)}; X is from 0 to 1"
        raise Refusal(422, "invalid_budget", "the budget is not known", hint) from None


def _errors(app: FastAPI, service: Service) -> None:
    """Every error in one form."""
    for kind in (HTTPException, TextError, RequestValidationError):

        @app.exception_handler(kind)
        async def refused(request: Request, error: Exception) -> Response:
            return service.refuse(_refusal(request, error))


def _refusal(request: Request, error: Exception) -> Refusal:
    """What a client is told of an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, TextError):
        return Refusal(422, "invalid_text", f"text {error.row} has no token", "give at least one word")
    if isinstance(error, HTTPException):
        code, message, hint = {
            400: ("invalid_json", "the body cannot be read as JSON", "send UTF-8 JSON, not nested deeply"),
            404: ("not_found", "there is no such path", "/openapi.json lists the paths"),
            405: ("method_not_allowed", "the path has another method", "the header Allow names it"),
        }.get(error.status_code, ("refused", "the request cannot be answered", _HINT))
        return Refusal(error.status_code, code, message, hint, dict(error.headers or {}))
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        message = f"the body is not JSON, from character {first['loc'][-1]} on"
        return Refusal(400, "invalid_json", message, "send UTF-8 JSON")
    if not _media_type(request).endswith("json"):
        message = "the body is not declared as JSON"
        return Refusal(415, "not_json", message, "send Content-Type: application/json")
    field = ascii(".".join(map(str, first["loc"][1:]))[:60])[1:-1] or "the body"
    return Refusal(422, "invalid_request", f"{field}: {first['msg'].removeprefix('Value error, ')}", _HINT)
