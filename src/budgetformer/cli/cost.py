"""budgetformer cost: what the paper counted, recomputed."""

from __future__ import annotations

import json

import typer

from budgetformer.cli import app
from budgetformer.errors import UsageError


@app.command()
def cost(
    paper: bool = typer.Option(
        False, "--paper", help="The paper's own count of its main table, beside the published values."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on standard output."),
) -> None:
    """Show what a model costs by the paper's own formula."""
    from budgetformer.cost.paper import PUBLISHED_MIB, summary

    if not paper:
        raise UsageError("say what to count: budgetformer cost --paper")
    result = summary()
    if as_json:
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for model, size in result["sizes_mib"].items():
        console.print(f"{model}: {size:.2f} MiB (published {PUBLISHED_MIB[model]:.2f})")
    table = Table(title="The paper's count: one FLOP a multiply-accumulate, attention only, whole test set")
    for heading in ("data set", "model", "quantity", "computed", "published", "matches"):
        table.add_column(heading, justify="right" if heading in ("computed", "published") else "left")
    for cell in result["cells"]:
        digits = ".3e" if cell["quantity"] == "flops" else ".4f"
        table.add_row(
            cell["dataset"],
            cell["model"],
            cell["quantity"],
            format(cell["computed"], digits),
            format(cell["published"], digits),
            "yes" if cell["matches"] else "NO",
        )
    console.print(table)
