"""budgetformer freeze: a static model with the globally best heads of a budgeted run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from budgetformer.cli import app


@app.command()
def freeze(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run that was trained with --base.", show_default=False)],
    budget: Annotated[float, typer.Option(help="The share of all heads that are kept.")] = 0.5,
    output: Annotated[Path, typer.Option("-o", "--output", help="The directory to write.")] = Path("frozen"),
) -> None:
    """Write a static model with RUN's globally best heads: no gates, no routing."""
    from budgetformer.cli.show import quiet_libraries
    from budgetformer.errors import UsageError
    from budgetformer.models import BudgetFormerForSequenceClassification
    from budgetformer.runs.files import write_directory, write_json
    from budgetformer.runs.run import Run

    quiet_libraries()
    if output.exists():
        raise UsageError(f"{output} exists already: give another directory with -o")
    opened = Run.open(run)
    model, tokenizer, record = opened.model, opened.tokenizer, opened.record
    frozen = model.freeze(budget)

    def fill(folder: Path) -> None:
        frozen.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if isinstance(frozen, BudgetFormerForSequenceClassification):
            write_json(folder / "run.json", {**record, "frozen": {"run": str(run), "budget": budget}})

    write_directory(output, fill)
    if isinstance(frozen, BudgetFormerForSequenceClassification):
        kept = [len(heads) for heads in frozen.config.gates["heads"]]
        total = frozen.config.num_hidden_layers * frozen.config.num_attention_heads
        print(f"{output}: {sum(kept)} of {total} heads, by layer {' '.join(map(str, kept))}")
        print("It loads with budgetformer only: its architecture's own code cannot hold fewer heads.")
    else:
        print(f"{output}: all heads; an ordinary {frozen.config.model_type} that loads without budgetformer")
