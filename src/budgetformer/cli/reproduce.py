"""budgetformer reproduce: the paper's tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from budgetformer.cli import app


@app.command()
def reproduce(
    which: Annotated[
        str | None, typer.Argument(metavar="ID|all", help="An experiment, several as a,b, or all.", show_default=False)
    ] = None,
    scale: Annotated[str, typer.Option(help="paper (to the letter), cpu or smoke.")] = "cpu",
    datasets: Annotated[str | None, typer.Option(help="Only these data sets, as a,b.")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds.", min=1)] = 1,
    jobs: Annotated[int, typer.Option(help="Training runs at once; the cores are shared out.", min=1)] = 1,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where cells and results go.")] = Path("reproduction"),
    as_list: Annotated[bool, typer.Option("--list", help="List the experiments and their cells.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build every model, estimate the cost, train nothing.")
    ] = False,
    data_dir: Annotated[
        str | None, typer.Option(help="A directory with the named data sets in folders (or BUDGETFORMER_DATA).")
    ] = None,
    flop_rate: Annotated[
        float | None, typer.Option(help="For --dry-run: FLOPs a second of the machine in mind (default: measured).")
    ] = None,
    premise: Annotated[str | None, typer.Option(help="The first text of the attention maps.")] = None,
    hypothesis: Annotated[str | None, typer.Option(help="The second text of the attention maps.")] = None,
    from_folder: Annotated[
        Path | None, typer.Option("--from", help="Train nothing: render this directory's results again.")
    ] = None,
) -> None:
    """Train what an experiment of the paper needs, and write its tables and figures beside the published numbers."""
    from budgetformer.cli.show import quiet_libraries
    from budgetformer.paper.reproduce import choose, list_experiments, make_plan, render_again, run

    quiet_libraries()
    if from_folder is not None:
        render_again(from_folder, output)
        return
    plan = make_plan(scale, output, seeds, datasets, data_dir, premise, hypothesis)
    experiments = choose(which or "all" if as_list or dry_run else which)
    if as_list:
        list_experiments(plan, experiments)
        return
    if dry_run:
        from budgetformer.paper.dry_run import dry_run as estimate

        estimate(plan, experiments, flop_rate)
        return
    run(plan, experiments, jobs)
