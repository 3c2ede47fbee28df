"""From an experiment's name to its files: cells, then results, then documents."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from budgetformer.errors import BudgetFormerError, UsageError
from budgetformer.paper import behaviour, beyond, tables
from budgetformer.paper.cells import Plan
from budgetformer.paper.grid import Failure, distinct, run_grid
from budgetformer.paper.needed import LATER, NEEDED
from budgetformer.paper.results import Result, provenance
from budgetformer.paper.scale import DATASETS, scale_named
from budgetformer.paper.store import Store
from budgetformer.runs.files import named_write_errors, write_json

RESULTS: dict[str, Callable[[Plan, Store], Result]] = {
    "main": tables.main,
    "fixed": tables.fixed,
    "random": tables.random,
    "model-scale": tables.model_scale,
    "data-scale": tables.data_scale,
    "dynamics": behaviour.dynamics,
    "complexity": behaviour.complexity,
    "heatmaps": behaviour.heatmaps,
    "attention-maps": behaviour.attention_maps,
    "sizes": tables.sizes,
    "ablation": beyond.ablation,
    "controls": beyond.controls,
    "needs": beyond.needs,
}


class GridError(BudgetFormerError):
    """Some cells failed; the exit code is the first one's."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        missing = "; ".join(f"{f.cell.name} ({f.reason.removeprefix('error: ')}; log: {f.log})" for f in failures)
        super().__init__(f"{len(failures)} cells are missing from the results: {missing}")
        self.exit_code = failures[0].exit_code


def make_plan(
    scale: str,
    folder: Path,
    seeds: int = 1,
    datasets: str | None = None,
    data_dir: str | None = None,
    premise: str | None = None,
    hypothesis: str | None = None,
) -> Plan:
    """Check what was asked for and say it as a Plan."""
    names = tuple(datasets.split(",")) if datasets else DATASETS
    for name in names:
        if name not in DATASETS:
            raise UsageError(f"--datasets {name}: give some of {', '.join(DATASETS)}")
    plan = Plan(scale_named(scale), folder, tuple(range(seeds)), tuple(n for n in DATASETS if n in names), data_dir)
    return replace(plan, pair=(premise or plan.pair[0], hypothesis or plan.pair[1]))


def choose(which: str | None) -> list[str]:
    """The experiments that a word means: `all`, one ID or several as a,b."""
    if which == "all":
        return list(NEEDED)
    if not which:
        raise UsageError(f"which experiment? Give all, or some of {', '.join(NEEDED)}")
    for name in (chosen := which.split(",")):
        if name not in NEEDED:
            near = difflib.get_close_matches(name, NEEDED, n=1)
            raise UsageError(f"experiment {name!r} is not known: {f'did you mean {near[0]}?' if near else ''} "
                             f"there are {', '.join(NEEDED)}")  # fmt: skip
    return [name for name in NEEDED if name in chosen]


def list_experiments(plan: Plan, experiments: Sequence[str]) -> None:
    """Print each experiment with its cells, and which of them are done."""
    for name in experiments:
        cells = distinct(NEEDED[name](plan))
        print(f"{name}: {sum(map(plan.done, cells))} of {len(cells)} cells done"
              f"{', and more that depend on their results' if name in LATER else ''}")  # fmt: skip
        for cell in cells:
            print(f"  {cell.name}")


def run(plan: Plan, experiments: Sequence[str], jobs: int = 1) -> None:
    """Compute the cells, then write results and documents; raise GridError if cells are missing."""
    store = Store(plan)
    failures = run_grid(plan, [cell for name in experiments for cell in NEEDED[name](plan)], jobs)
    later = [cell for name in experiments if name in LATER for cell in LATER[name](plan, store)]
    failures += run_grid(plan, later, jobs)
    write_results(plan, store, experiments)
    if failures:
        raise GridError(failures)


def write_results(plan: Plan, store: Store, experiments: Sequence[str]) -> None:
    """Write results/ID.json of each experiment from the cells that are done, and the documents."""
    with named_write_errors(plan.folder):
        (plan.folder / "results").mkdir(parents=True, exist_ok=True)
    for name in experiments:
        cells = distinct([*NEEDED[name](plan), *(LATER[name](plan, store) if name in LATER else ())])
        found = asdict(RESULTS[name](plan, store))
        if plan.scale.name != "cpu":  # explanations are of the published runs, which have that scale
            found["claims"] = [{**claim, "explanation": ""} for claim in found["claims"]]
        result = {"id": name, "scale": plan.scale.name, **found, "provenance": provenance(plan, store, cells)}
        write_json(plan.folder / "results" / f"{name}.json", result)
    render(plan.folder, plan.folder)


def render(source: Path, folder: Path) -> None:
    """Write the documents of all results that a folder holds, also those of earlier calls; nothing is trained."""
    from budgetformer.paper.render import read, write

    if not (results := read(source)):
        raise UsageError(f"{source} holds no results (results/*.json): reproduce an experiment into it first")
    write(results, folder)
