"""budgetformer explain: what a run does with a text, as a page in one file."""

from __future__ import annotations

import sys
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from budgetformer.cli import app

_LEFT_OUT = {
    "chosen": "the attention maps at other budgets were left out to keep the file small",
    "none": "the attention maps were left out to keep the file small: give a shorter text to have them",
}


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)],
    text: Annotated[list[str], typer.Option(help="The text; twice: two texts to compare.", show_default=False)],
    text_pair: Annotated[list[str] | None, typer.Option(help="Its second text, if the model reads pairs.")] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Where the slider begins: learned, full, a share of the cost, max:X, mean:X, a point's name."
        ),
    ] = "learned",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The page (default: heads.html).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output, at any budget.")] = False,
) -> None:
    """Show which heads RUN uses for a text, where they look and what they cost, as one HTML file."""
    from budgetformer.cli.show import print_json
    from budgetformer.errors import UsageError
    from budgetformer.explain import Explainer, describe, page
    from budgetformer.runs.files import write_text
    from budgetformer.runs.run import Run

    opened, texts = Run.open(run), list(zip_longest(text, text_pair or ()))
    opened.check_pairs(bool(text_pair), "--text-pair")
    if len(text) > 2 or len(texts) != len(text) or (text_pair and len(text_pair) != len(text)):
        raise UsageError("give --text once, or twice to compare, and --text-pair as often where the model reads pairs")
    explainer, dial = Explainer(opened.model, opened.tokenizer, opened.max_length), opened.budget(budget)
    if as_json:
        first, *rest = (explainer.explain(*each, dial) for each in texts)
        print_json({**first, **({"compare": rest[0]} if rest else {})})
    if as_json and output is None:
        return
    data, output = explainer.precompute(texts, dial), output or Path("heads.html")
    data["description"] = describe(opened.config, run)
    write_text(output, page(data), "Give another file with -o")
    if data["maps"] in _LEFT_OUT:
        print(_LEFT_OUT[data["maps"]], file=sys.stderr)
    if not as_json:
        print(output)
        print(f"next: open {output} in a browser; for other texts: budgetformer serve {run}", file=sys.stderr)
