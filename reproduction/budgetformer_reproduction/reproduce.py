"""From an experiment's name to its files: cells, then results, then documents."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from budgetformer.errors import UsageError
from budgetformer.runs.files import named_write_errors
from budgetformer_reproduction import controls, figures, scaling, tables
from budgetformer_reproduction.cells import Cell, Plan, Precision
from budgetformer_reproduction.grid import Failure, GridError, run_grid
from budgetformer_reproduction.render import read, write
from budgetformer_reproduction.results import Findings
from budgetformer_reproduction.scale import DATASETS, scale_named
from budgetformer_reproduction.schema import Result, checked
from budgetformer_reproduction.store import Store

# An experiment asks the store for the cells that it is made of, and makes do with those that are done.
EXPERIMENTS: dict[str, Callable[[Plan, Store], Findings]] = {
    "main": tables.main,
    "fixed": tables.fixed,
    "random": tables.random,
    "model-scale": scaling.model_scale,
    "data-scale": scaling.data_scale,
    "dynamics": figures.dynamics,
    "complexity": figures.complexity,
    "heatmaps": figures.heatmaps,
    "attention-maps": figures.attention_maps,
    "sizes": tables.sizes,
    "ablation": controls.ablation,
    "controls": controls.controls,
    "needs": controls.needs,
}
_IN_TWO_WAVES = ("controls",)  # which ask for more cells once they have seen the first ones


class PlanFile(BaseModel):
    """What a plan in TOML may say. Data sets are looked for in `data_dir`, or where BUDGETFORMER_DATA points."""

    model_config = ConfigDict(strict=True, extra="forbid")

    scale: str = "cpu"
    data_dir: str | None = None
    premise: str = "A man is playing guitar on a stage."  # the pair of the attention maps: the paper's
    hypothesis: str = "A man is sleeping in a bed."
    precision: Precision = "fp32"  # of training: bf16 is a third faster where the processor has it
    flop_rate: Annotated[float, Field(gt=0)] | None = None  # of the machine in mind, in a dry run; else measured


def make_plan(scale: str, folder: Path, seeds: int = 1, datasets: str | None = None) -> Plan:
    """Check what was asked for and say it as a Plan. `scale` is a scale's name or a plan file."""
    options: dict[str, Any] = {"scale": scale}
    if scale.endswith(".toml"):
        try:
            options = tomllib.loads(Path(scale).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"--scale {scale}: it cannot be read ({error}): give a file in TOML") from None
    file = checked(PlanFile, options, f"--scale {scale}", f"a plan has {', '.join(PlanFile.model_fields)}", UsageError)
    names = tuple(datasets.split(",")) if datasets else DATASETS
    for name in names:
        if name not in DATASETS:
            raise UsageError(f"--datasets {name}: give some of {', '.join(DATASETS)}")
    return Plan(
        scale_named(file.scale), folder, tuple(range(seeds)), tuple(name for name in DATASETS if name in names),
        file.data_dir, (file.premise, file.hypothesis), file.precision, file.flop_rate,
    )  # fmt: skip


def choose(which: str | None) -> list[str]:
    """The experiments that a word means: `all`, one ID or several as a,b."""
    if which == "all":
        return list(EXPERIMENTS)
    if not which:
        raise UsageError(f"which experiment? Give all, or some of {', '.join(EXPERIMENTS)}")
    for name in (chosen := which.split(",")):
        if name not in EXPERIMENTS:
            near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
            raise UsageError(f"experiment {name!r} is not known: {f'did you mean {near[0]}?' if near else ''} "
                             f"there are {', '.join(EXPERIMENTS)}")  # fmt: skip
    return [name for name in EXPERIMENTS if name in chosen]


def needed(plan: Plan, experiments: Sequence[str]) -> dict[str, Cell]:
    """The cells that experiments ask for as long as none is done, by name."""
    store = Store(plan, read=False)
    for name in experiments:
        EXPERIMENTS[name](plan, store)
    return store.asked


def list_experiments(plan: Plan) -> None:
    """Print each experiment with its cells, and which of them are done."""
    for name in EXPERIMENTS:
        cells = needed(plan, [name])
        print(f"{name}: {sum(map(plan.done, cells.values()))} of {len(cells)} cells done"
              f"{', and more that depend on their results' if name in _IN_TWO_WAVES else ''}")  # fmt: skip
        print("".join(f"  {cell}\n" for cell in cells), end="")


def run(plan: Plan, experiments: Sequence[str], jobs: int = 1) -> None:
    """Compute the cells, then write results and documents; raise GridError if cells are missing."""
    failures: list[Failure] = []
    tried: dict[str, Cell] = {}
    results: dict[str, Result] = {}
    cells = needed(plan, experiments)
    while cells or not results:
        failures += run_grid(plan, list(cells.values()), jobs)
        tried |= cells
        results, asked = tabulate(plan, experiments)
        cells = {name: cell for name, cell in asked.items() if name not in tried}
    try:
        render(plan.folder, plan.folder, results)
    except UsageError:  # nothing to render: where cells failed, that is what went wrong
        if not failures:
            raise
    if failures:
        raise GridError(failures)


def tabulate(plan: Plan, experiments: Sequence[str]) -> tuple[dict[str, Result], dict[str, Cell]]:
    """The results of experiments from the cells that are finished, and all cells that they ask for, by name."""
    results, asked = dict[str, Result](), dict[str, Cell]()
    for name in experiments:
        store = Store(plan)
        results[name] = EXPERIMENTS[name](plan, store).result(name, plan, store.done)
        asked |= store.asked
    return results, asked


def render(source: Path, folder: Path, new: Mapping[str, Result] | None = None) -> None:
    """Write the documents of the new results and of all others that a folder holds; nothing is trained.

    A new one without a table or figure (attention maps, where the weights are not) leaves the one that is there; where
    there is none, it is shown with what it has to say, such as that a claim was not tested.
    """
    results = {result.id: result for result in read(source)}
    for name, result in (new or {}).items():
        if result.tables or result.figures or (name not in results and (result.summary or result.claims)):
            results[name] = result
    if not results:
        raise UsageError(f"{source} holds no results (results/*.json): reproduce an experiment into it first")
    with named_write_errors(folder):
        write(list(results.values()), folder)
