"""budgetformer train: from data to a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from budgetformer.cli import app
from budgetformer.cli.data_flags import TABLES, takes_data
from budgetformer.data.locate import DataSource
from budgetformer.training.recipe import PRESETS, Recipe


@app.command()
@takes_data(*TABLES, "unlabelled", "validation_fraction", "test_fraction", "seed", "limit")
def train(
    source: DataSource,
    output: Annotated[Path, typer.Option("-o", "--output", help="The run's directory.")] = Path("run"),
    preset: Annotated[str | None, typer.Option(help=f"{', '.join(PRESETS)} (default: small).")] = None,
    base: Annotated[
        str | None,
        typer.Option(help="A pretrained encoder (directory, hub name, demo:minilm): gets exits, and is narrowed."),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="A TOML file that changes the preset.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training rows (--base: with budgets).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of one optimiser step.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--lr", help="The learning rate.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a text; longer ones are cut.")] = None,
    exits: Annotated[
        str | None, typer.Option(help="Layers after which texts may leave, such as 2,4; none: no exits and no words.")
    ] = None,
    no_words: Annotated[bool, typer.Option("--no-words", help="No stage of words before the first layer.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer's name or directory, or a vocab.txt (default: trained here).")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other key, as patience=2 or model.gates.min_heads=0."),
    ] = None,
    with_baseline: Annotated[bool, typer.Option("--with-baseline", help="Train the dense twin too.")] = False,
    seeds: Annotated[int, typer.Option(help="Repeat with this many seeds.", min=1)] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the directory.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")] = False,
    no_examples: Annotated[
        bool, typer.Option("--no-examples", help="Store no validation texts as examples for the page of serve.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the evaluation as JSON.")] = False,
) -> None:
    """Train a classifier on DATA: a run directory with model, evaluation and report."""
    from budgetformer.cli.process import keep_freed_memory, set_training_threads
    from budgetformer.cli.show import print_json, print_result, print_seeds
    from budgetformer.models.config import BudgetFormerConfig
    from budgetformer.training.run import train_run, train_seeds

    depth = [] if exits is None else ["model.exits=none" if exits == "none" else f"model.exits.layers=[{exits}]"]
    depth += ["model.exits.words=false"] if no_words and exits != "none" else []
    chosen = Recipe.make(
        preset, recipe, [*(changes or ()), *depth], epochs=epochs, batch_size=batch_size,
        learning_rate=learning_rate, max_length=max_length, tokenizer=tokenizer, base=base,
    )  # fmt: skip
    if chosen.base is None:
        width = chosen.model.get("hidden_size") or BudgetFormerConfig.preset(chosen.preset).hidden_size
        set_training_threads(chosen.token_budget or (chosen.batch_size or 1) * chosen.max_length, width)
    keep_freed_memory()
    options: dict[str, Any] = {"with_baseline": with_baseline, "resume": resume, "tensorboard": tensorboard}
    options["examples"] = not no_examples
    if seeds > 1:
        if summary := train_seeds(source, chosen, output, seeds, **options):
            print_json(summary) if as_json else print_seeds(summary)
        return
    result = train_run(source, chosen, output, **options)
    if result:  # only the main process has one
        print_json(result) if as_json else print_result(result, output)
