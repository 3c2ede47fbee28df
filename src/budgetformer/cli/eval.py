"""budgetformer eval: a finished run on labelled data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from budgetformer.cli import app
from budgetformer.cli.data_flags import BUDGET, COLUMNS, takes_data
from budgetformer.data.locate import DataSource


@app.command("eval")
@takes_data(*COLUMNS)
def evaluate(
    source: DataSource,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)],
    split: Annotated[str | None, typer.Option(help="Which split of DATA (default: test, or the only one).")] = None,
    budget: Annotated[list[str] | None, typer.Option(help=BUDGET)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Evaluate RUN on labelled DATA: quality, heads and cost, against its dense twin if it has one."""
    from budgetformer.cli.show import print_evaluations, print_json
    from budgetformer.runs.run import Run

    result = Run.open(run).evaluate(source, split=split, budgets=budget or [None], limit=source.limit)
    columns, notes = result.pop("columns"), result.pop("notes")
    print(columns, *(f"warning: {note}" for note in notes), sep="\n", file=sys.stderr)
    if as_json:
        print_json(result)
        return
    first = result["evaluations"][0]
    rows = result["evaluations"] + ([{**result["baseline"], "dial": "dense twin"}] if result["baseline"] else [])
    print_evaluations(rows, f"{run} on {first['rows']} {first['split']} rows of {source.data}")
    if result["versus_baseline"]:
        print(f"At {first['dial']}, BudgetFormer is {result['versus_baseline']['verdict']}.")
