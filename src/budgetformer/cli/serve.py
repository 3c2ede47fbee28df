"""budgetformer serve: a run behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from budgetformer.cli import app
from budgetformer.cli.data_flags import BUDGET
from budgetformer.cli.process import available_cpus

_KEYS = (
    "Batches and limits: batch_tokens=8192 (with padding; 1: no batching), wait_ms=2 (for others in a batch), "
    "queue=256 (texts of a worker, else 503), max_texts=64 (of a request), max_chars=20000 (of a text), "
    "max_bytes=1048576 (of a body), timeout=10 (seconds), audit=0.05 (of early answers, run to the end in idle time)."
)


@app.command()
def serve(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The directory of a run, or of an export.", show_default=False)
    ],
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 opens it to others.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65535)] = 8000,
    budget: Annotated[str | None, typer.Option(help=BUDGET)] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that requests may address besides --host, where no key is set; * for any."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes, each with its own model.", min=1)] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of a model (default: its cores but one).", min=1)] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_KEYS)] = None,
) -> None:
    """Serve RUN over HTTP: POST /predict, GET /info, /health, /ready, /metrics, and a page at /.

    If BUDGETFORMER_API_KEY is set, requests must carry it. SIGTERM finishes what is in and exits with 0.
    """
    from budgetformer.errors import MissingExtraError
    from budgetformer.serving.settings import Settings

    threads = threads or max(1, available_cpus() // workers - 1)  # HTTP and tokens need one too
    settings = Settings.make(
        changes or (), run=run, budget=budget, host=host, port=port, allowed_hosts=allowed_host or (), workers=workers,
        threads=threads,
    )  # fmt: skip
    try:
        from budgetformer.serving.server import serve as run_server
    except ModuleNotFoundError as error:
        raise MissingExtraError("serve", error.name or "fastapi") from None
    run_server(settings)
