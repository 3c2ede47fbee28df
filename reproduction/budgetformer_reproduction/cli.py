"""budgetformer reproduce: the paper's tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def reproduce(
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="ID|all|list|cost|pack",
            help="An experiment, several as a,b, or all. list: which there are, and their cells. "
            "cost: the paper's own count of its main table, beside the published values. "
            "pack: the finished cells of --from, without weights, as a zip file for each data set in OUTPUT.",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="paper (to the letter), medium, cpu, smoke, or a plan (TOML).")
    ] = "cpu",
    datasets: Annotated[str | None, typer.Option(help="Only these data sets, as a,b.")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds.", min=1)] = 1,
    jobs: Annotated[int, typer.Option(help="Training runs at once; the cores are shared out.", min=1)] = 1,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where cells and results go.")] = Path("reproduced"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build every model, estimate the cost, train nothing.")
    ] = False,
    from_folder: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Train nothing: render the results in this directory, with an ID those of its finished cells; "
            "or pack them.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="cost as JSON on standard output.")] = False,
) -> None:
    """Train what an experiment of the paper needs, and write its tables and figures beside the published numbers."""
    from budgetformer.errors import UsageError

    if as_json and which != "cost":
        raise UsageError("--json is for reproduce cost: an experiment's results are JSON in OUTPUT/results")
    if which == "cost":
        _print_cost(as_json)
        return
    from budgetformer_reproduction.reproduce import choose, list_experiments, make_plan, render, run, tabulate

    if which == "pack":
        from budgetformer_reproduction.pack import pack

        if from_folder is None:
            raise UsageError("reproduce pack: say where the cells are with --from, and where the files go with -o")
        for file in pack(from_folder, output, make_plan(scale, output, seeds, datasets).datasets):
            print(file)
        return
    if from_folder is not None:
        plan = make_plan(scale, from_folder, seeds, datasets)
        render(from_folder, output, tabulate(plan, choose(which))[0] if which else None)
        return
    plan = make_plan(scale, output, seeds, datasets)
    if which == "list":
        list_experiments(plan)
    elif dry_run:
        from budgetformer_reproduction.dry_run import dry_run as estimate

        estimate(plan, choose(which or "all"))
    else:
        run(plan, choose(which), jobs)


def _print_cost(as_json: bool) -> None:
    """The paper's own count of its main table, beside the published values."""
    from rich.console import Console
    from rich.table import Table

    from budgetformer.cli.show import print_json
    from budgetformer_reproduction.published import PUBLISHED_MIB, summary

    result = summary()
    if as_json:
        print_json(result)
        return
    console = Console()
    for model, size in result["sizes_mib"].items():
        console.print(f"{model}: {size:.2f} MiB (published {PUBLISHED_MIB[model]:.2f})")
    table = Table(title="The paper's count: one FLOP a multiply-accumulate, attention only, whole test set")
    for heading in ("data set", "model", "quantity", "computed", "published", "matches"):
        table.add_column(heading, justify="right" if heading in ("computed", "published") else "left")
    for cell in result["cells"]:
        digits = ".3e" if cell["quantity"] == "flops" else ".4f"
        values = [format(cell[key], digits) for key in ("computed", "published")]
        table.add_row(
            cell["dataset"], cell["model"], cell["quantity"], *values, "yes" if cell["matches"] else "NO"
        )  # fmt: skip
    console.print(table)
