"""budgetformer eval: a finished run on labelled data."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from budgetformer.cli import app
from budgetformer.cli.data_flags import takes_data
from budgetformer.data.locate import DataSource

if TYPE_CHECKING:
    from budgetformer.data import DataSet


@app.command("eval")
@takes_data
def evaluate(
    source: DataSource,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)],
    split: Annotated[str | None, typer.Option(help="Which split of DATA (default: test, or the only one).")] = None,
    budget: Annotated[
        list[str] | None, typer.Option(help="learned, full, fixed:X, max:X, mean:X, or a calibrated point.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Evaluate RUN on labelled DATA: quality, heads and cost, against its dense twin if it has one."""
    from budgetformer.calibrate import read_dial
    from budgetformer.cli.show import print_evaluations, print_json, quiet_libraries
    from budgetformer.data import encode
    from budgetformer.evaluate import mcnemar, right, run_model, summarize
    from budgetformer.runs.run import load_run
    from budgetformer.training.results import with_texts

    quiet_libraries()
    dials = [str(read_dial(text, run)) for text in budget or ["learned"]]
    model, tokenizer, record = load_run(run)
    data, name = held_out(source, split, record)
    print(data.columns_chosen, *(f"warning: {w}" for w in data.warnings), sep="\n", file=sys.stderr)
    encoded = encode(data.splits[name], data, tokenizer, record["max_length"])
    evaluations, outcomes = [], []
    for dial in dials:
        outcome = run_model(model, encoded, dial)
        outcomes.append(outcome)
        evaluations.append(summarize(outcome, encoded, model.config, split=name, dial=dial, hardest=12))
    evaluations[0] = with_texts(evaluations[0], data, name)
    evaluations[1:] = [replace(e, hardest=[]) for e in evaluations[1:]]
    result: dict[str, Any] = {
        "evaluations": [asdict(e) for e in evaluations],
        "baseline": None,
        "versus_baseline": None,
    }
    if (run / "baseline" / "config.json").exists():
        twin, _, _ = load_run(run / "baseline")
        theirs = run_model(twin, encoded)
        result["baseline"] = asdict(summarize(theirs, encoded, twin.config, split=name, dial="learned"))
        ours_right, theirs_right = (right(o, encoded, model.config.task) for o in (outcomes[0], theirs))
        if ours_right is not None and theirs_right is not None:
            result["versus_baseline"] = mcnemar(ours_right, theirs_right)
    if as_json:
        print_json(result)
        return
    rows = result["evaluations"] + ([{**result["baseline"], "dial": "dense twin"}] if result["baseline"] else [])
    print_evaluations(rows, f"{run} on {len(encoded)} {name} rows of {source.data}")
    if result["versus_baseline"]:
        print(f"At {dials[0]}, BudgetFormer is {result['versus_baseline']['verdict']}.")


def held_out(source: DataSource, split: str | None, record: dict[str, Any], own: str = "test") -> tuple[DataSet, str]:
    """The rows to evaluate on, read as the run read its own; of the run's own data, those it kept back."""
    from budgetformer.data.dataset import open_data, open_labelled

    task = {"single_label_classification": "single", "multi_label_classification": "multi"}.get(
        record["task"], "regression"
    )
    trained = record["data"]
    if source.data == trained["data"] and split is None:
        data = open_data(DataSource(**trained))
        return data, own if own in data.splits else "validation"
    names = ("text", "text_pair", "label", "label_separator")
    columns = {key: getattr(source, key) or trained[key] for key in names}
    data = open_labelled(replace(source, **columns), task, record["labels"], split)
    name = next(iter(data.splits))
    if source.data == trained["data"] and name == "train":
        print("warning: these rows hold the ones that the run was trained on", file=sys.stderr)
    return data, name
