"""Middleware: keys, hosts, sizes, timeouts and counts, before anything is parsed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import logging
import time
import traceback
from collections.abc import Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from budgetformer.serving.messages import Refusal, busy
from budgetformer.serving.service import Service

PATHS = ("/", "/predict", "/explain", "/attention", "/info", "/health", "/ready", "/metrics", "/openapi.json")
OPEN = ("/health", "/ready")
_DISCARD_SECONDS = 1.0
logger = logging.getLogger("budgetformer.serving")


class Admission:
    """Checks requests before the app sees them, counts every answer, and logs nothing that may hold a text.

    A POST to a path of `direct` goes to the app there instead.
    """

    def __init__(self, app: ASGIApp, service: Service, key: str | None, direct: Mapping[str, ASGIApp]) -> None:
        self._app, self._service, self._limits = app, service, service.settings
        self._direct = direct
        self._key = key.encode() if key else None
        self._addressed = lru_cache(maxsize=256)(self._is_addressed)
        self._inside = 0  # requests with a body, from their head to their answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, posts = time.perf_counter(), 0, 0
        if scope["method"] == "HEAD":  # wherever GET works; the server leaves the body out
            scope = {**scope, "method": "GET"}

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            async with asyncio.timeout(self._limits.timeout):  # a client that does not read must not hold its place
                await send(message)

        try:
            headers = dict(scope["headers"])
            self._admit(scope, headers)
            posts = scope["method"] == "POST"
            self._inside += posts
            deadline = asyncio.get_running_loop().time() + self._limits.timeout
            scope["state"] = {**scope.get("state", {}), "deadline": deadline}
            app = self._direct.get(scope["path"], self._app) if posts else self._app
            await app(scope, self._limited(receive, headers, deadline), sending)
        except Exception as error:
            if not isinstance(error, Refusal):
                where = "".join(traceback.format_tb(error.__traceback__))  # no message: it may hold a text
                logger.error("%s at %s\n%s", type(error).__name__, _label(scope), where)
                error = Refusal(500, "internal", "the service failed on this request", "tell its operator")
            if not status:
                await self._service.refuse(error)(scope, receive, sending)
        finally:
            self._inside -= posts
            path = _label(scope)
            self._service.metrics.requests.labels(path, status).inc()
            self._service.metrics.latency.labels(path).observe(time.perf_counter() - began)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse what needs no look at the body: a wrong key or host, and work that cannot be taken now."""
        guarded = scope["path"] not in OPEN
        if guarded and self._key is None and not self._addressed(headers.get(b"host", b"")):
            raise Refusal(
                403, "host_not_allowed", "the request's Host is not the address that the service listens on",
                "serve with --allowed-host NAME, or set an API key",
            )  # fmt: skip
        if guarded and self._key is not None and not hmac.compare_digest(_key(headers), self._key):
            raise Refusal(
                401, "unauthorized", "the API key is missing or wrong",
                "send Authorization: Bearer KEY or X-API-Key: KEY; a browser asks for it as a password",
                {"WWW-Authenticate": 'Bearer, Basic realm="budgetformer"'},
            )  # fmt: skip
        if scope["method"] == "POST":
            self._service.check_ready()
            if max(self._service.inside, self._inside) >= self._limits.queue:  # bodies need memory before they count
                raise busy("queue_full", f"{self._limits.queue} texts are waiting, and no more may wait")

    def _is_addressed(self, header: bytes) -> bool:
        """Whether a Host header names this service; where a page's name was rebound to its address, it does not.

        Browsers always send one. An address cannot be rebound, so where the service listens on all of them any will do.
        """
        host = header.decode("latin-1")
        names = {name.lower() for name in (self._limits.host, *self._limits.allowed_hosts)}
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        asked, bound = _address(name), _address(self._limits.host)
        same = asked and bound and (bound.is_unspecified or (bound.is_loopback and asked.is_loopback))
        return not host or "*" in names or name in names or bool(same)

    def _limited(self, receive: Receive, headers: dict[bytes, bytes], deadline: float) -> Receive:
        """`receive`, with an end to the body's size and time."""
        size, ended = 0, False
        length = headers.get(b"content-length", b"0")
        declared = int(length[:20]) if length.isdigit() else 0

        async def limited() -> Message:
            nonlocal size, ended
            if ended:
                return await receive()
            if declared > self._limits.max_bytes:
                raise await self._too_large(receive, wait=b"expect" not in headers)
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise Refusal(
                    408, "request_timeout", f"the body did not arrive within {self._limits.timeout:g} s",
                    "send it faster, or less of it", {"Connection": "close"},
                ) from None  # fmt: skip
            size += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            if size > self._limits.max_bytes:
                raise await self._too_large(receive, wait=not ended)
            return message

        return limited

    async def _too_large(self, receive: Receive, *, wait: bool) -> Refusal:
        """The refusal of a body; what of it is on its way is read first, or the client might miss the answer."""
        if wait:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DISCARD_SECONDS):
                    while (await receive()).get("more_body", False):
                        pass
        return Refusal(
            413, "body_too_large", f"the body has more than {self._limits.max_bytes} bytes",
            "send fewer or shorter texts in a request; /info has the limits", {"Connection": "close"},
        )  # fmt: skip


def _key(headers: dict[bytes, bytes]) -> bytes:
    """The key that a request carries. Basic is for the page: a browser can ask for it."""
    kind, _, token = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return token.strip()
    if kind.lower() == b"basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(token.strip(), validate=True).partition(b":")[2]
    return headers.get(b"x-api-key", b"")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None


def _label(scope: Scope) -> str:
    path: str = scope["path"]
    return path if path in PATHS else "other"
