"""budgetformer calibrate: the dial's curve on held-out data, and operating points with names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from budgetformer.cli import app
from budgetformer.cli.data_flags import COLUMNS, takes_data
from budgetformer.data.locate import DataSource


@app.command()
@takes_data(*COLUMNS)
def calibrate(
    source: DataSource,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)],
    split: Annotated[
        str | None, typer.Option(help="Which split of DATA (default: validation of the run's own)")
    ] = None,
    max_disagreement: Annotated[
        list[float] | None,
        typer.Option(help="Guarantee: at most this percent of texts get another label than from the full model."),
    ] = None,
    max_drop: Annotated[
        list[float] | None,
        typer.Option(help="Guarantee: accuracy at most this many points below the full model's (needs labels)."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="The probability with which guarantees hold.")] = 0.95,
    max_cost: Annotated[
        list[float] | None, typer.Option(help="The best position at this share of the dense model's FLOPs.")
    ] = None,
    target_ms: Annotated[
        list[float] | None, typer.Option(help="The best position at this time for one text alone, on this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Sweep RUN's budget over held-out DATA; its points are names for --budget, e.g. max-disagreement-0.5."""
    from budgetformer.cli.show import print_calibration, print_json
    from budgetformer.runs.run import Run

    targets = {"max_disagreement": max_disagreement or (), "max_drop": max_drop or (), "max_cost": max_cost or ()}
    options = {**targets, "target_ms": target_ms or (), "confidence": confidence}
    result = Run.open(run).calibrate(source, split=split, limit=source.limit, **options)
    columns, notes = result.pop("columns"), result.pop("notes")
    print(columns, *(f"warning: {note}" for note in notes), sep="\n", file=sys.stderr)
    print_json(result) if as_json else print_calibration(result, run)
