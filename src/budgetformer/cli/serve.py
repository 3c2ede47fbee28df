"""budgetformer serve: a run behind HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from budgetformer.cli import app
from budgetformer.cli.data_flags import BUDGET


@app.command()
def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)],
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 opens it to others.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65535)] = 8000,
    budget: Annotated[str, typer.Option(help=BUDGET)] = "learned",
    workers: Annotated[int, typer.Option(help="Processes, each with its own model.", min=1)] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of a model (default: its cores but one).", min=1)] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch, with padding; 1: no batching.")] = 8192,
    wait_ms: Annotated[float, typer.Option(help="How long a text may wait for company.")] = 2,
    queue: Annotated[int, typer.Option(help="Texts taken in and not yet answered, of a worker; else 503.")] = 256,
    max_texts: Annotated[int, typer.Option(help="Texts of a request.")] = 64,
    max_chars: Annotated[int, typer.Option(help="Characters of a text.")] = 20_000,
    max_bytes: Annotated[int, typer.Option(help="Bytes of a body.")] = 2**20,
    timeout: Annotated[float, typer.Option(help="Seconds for a request.")] = 10,
) -> None:
    """Serve RUN over HTTP: POST /predict, GET /info, /health, /ready, /metrics, and a page at /.

    If BUDGETFORMER_API_KEY is set, requests must carry it. SIGTERM finishes what is in and exits with 0.
    """
    from budgetformer.errors import MissingExtraError
    from budgetformer.serving.settings import Settings

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    settings = Settings(
        run=run, budget=budget, batch_tokens=batch_tokens, wait_ms=wait_ms, queue=queue, max_texts=max_texts,
        max_chars=max_chars, max_bytes=max_bytes, timeout=timeout, workers=workers,
        threads=threads or max(1, cores // workers - 1),  # HTTP and tokens need one too
    )  # fmt: skip
    try:
        from budgetformer.serving.server import serve as run_server
    except ModuleNotFoundError as error:
        raise MissingExtraError("serve", error.name or "fastapi") from None
    run_server(settings, host=host, port=port)
