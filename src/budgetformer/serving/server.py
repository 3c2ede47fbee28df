"""Processes and signals: uvicorn runs the app, here or in workers of its own."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import signal
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from budgetformer.errors import BudgetFormerError, ModelError, UsageError
from budgetformer.runs.record import read_record
from budgetformer.serving.settings import KEY, Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

_METRICS = "PROMETHEUS_MULTIPROC_DIR"
_BACKLOG = 2048
_SWITCH = 0.0005  # seconds that a thread may hold the interpreter (Python's 5 ms are a deadline's length)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; then accept nothing more, answer what is in, and return."""
    logs = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    logs["filters"] = {"rate": {"()": "budgetformer.serving.connections.RateLimit"}}
    logs["handlers"]["default"]["filters"] = ["rate"]
    logs["root"] = {"handlers": ["default"], "level": "WARNING"}
    config = uvicorn.Config(
        partial(_worker, settings), factory=True, workers=settings.workers, lifespan="on", log_level="warning",
        access_log=False, server_header=False, backlog=_BACKLOG, ws="none", log_config=logs,
        http="budgetformer.serving.connections:Connection", loop="budgetformer.serving.connections:Loop",
        headers=[("X-Content-Type-Options", "nosniff")], timeout_graceful_shutdown=math.ceil(settings.timeout) + 5,
    )  # fmt: skip
    with _bind(settings) as listening, tempfile.TemporaryDirectory(prefix="budgetformer-metrics-") as folder:
        if settings.workers == 1:
            app = build(settings)
            _announce(listening, settings, app.state.pairs)
            config.app, config.factory = app, False
            for stop in (signal.SIGTERM, signal.SIGINT):  # uvicorn handles both, and then raises them once more
                signal.signal(stop, signal.SIG_IGN)
            uvicorn.Server(config).run([listening])
            return
        os.environ[_METRICS] = folder
        _announce(listening, settings, read_record(settings.run)["pairs"])
        supervisor = Multiprocess(config, [listening])
        supervisor.run()
        if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
            raise ModelError(f"{settings.run}: a worker could not start, for the reason above")


def build(settings: Settings) -> FastAPI:
    """Load the run and make the app of one process."""
    from budgetformer.serving.app import make_app
    from budgetformer.serving.service import Engine

    app = make_app(Engine(settings), settings)
    sys.setswitchinterval(_SWITCH)
    gc.collect()
    gc.freeze()  # or every full collection walks all that is imported, and every request waits for it
    return app


def _worker(settings: Settings) -> FastAPI:
    """`build` in a worker: an error that would meet every worker stops them all."""
    from prometheus_client.multiprocess import mark_process_dead

    for file in Path(os.environ[_METRICS]).glob("gauge_live*.db"):  # of workers that died
        pid = int(file.stem.rpartition("_")[2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            mark_process_dead(pid)  # type: ignore[no-untyped-call]
    try:
        return build(settings)
    except BudgetFormerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(STARTUP_FAILURE)


def _bind(settings: Settings) -> socket.socket:
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: the service cannot listen there ({error})") from None
    return listening


def _announce(listening: socket.socket, settings: Settings, pairs: bool) -> None:
    """Say where it listens, and how to ask it something."""
    listening.listen(_BACKLOG)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{listening.getsockname()[1]}"
    second = {"text_pair": "a good one"} if pairs else {}
    body = json.dumps({"text": "a fine film", **second})
    key = f' -H "X-API-Key: ${KEY}"' if os.environ.get(KEY) else ""
    print(f"serving {settings.run} at {url}", file=sys.stderr)
    print(f"next: curl {url}/predict -H 'Content-Type: application/json'{key} -d '{body}'", file=sys.stderr, flush=True)
