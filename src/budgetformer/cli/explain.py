"""budgetformer explain: what a run does with a text, as a page in one file."""

from __future__ import annotations

import sys
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
    text: Annotated[str, typer.Option(help="The text.", show_default=False)],
    text_pair: Annotated[str | None, typer.Option(help="Its second text, if the model reads pairs.")] = None,
    compare: Annotated[str | None, typer.Option(help="Another text, to stand beside the first.")] = None,
    compare_pair: Annotated[str | None, typer.Option(help="The other text's second text.")] = None,
    budget: Annotated[str, typer.Option(help="Where the slider begins: learned, full, max:X.")] = "learned",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The page (default: heads.html).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output, at any budget.")] = False,
) -> None:
    """Show which heads RUN uses for a text, where they look and what they cost, as one HTML file."""
    from budgetformer import explain as page
    from budgetformer.cli.show import print_json, quiet_libraries
    from budgetformer.errors import ModelError, UsageError
    from budgetformer.runs.run import Run

    quiet_libraries()
    if compare_pair is not None and compare is None:
        raise UsageError("--compare-pair without --compare: give the other text too")
    texts = [(text, text_pair)] + ([(compare, compare_pair)] if compare is not None else [])
    opened = Run.open(run)
    budget = str(opened.budget(budget))
    for _, second in texts:
        if (second is not None) != opened.pairs:
            need = "pairs: give the second with --text-pair (--compare-pair)" if opened.pairs else "single texts"
            raise UsageError(f"{run} reads {need}")
    model, tokenizer, limit = opened.model, opened.tokenizer, opened.max_length
    if as_json:
        first, *rest = (page.explain(model, tokenizer, *each, budget, limit) for each in texts)
        print_json({**first, **({"compare": rest[0]} if rest else {})})
    if as_json and output is None:
        return
    data = page.precompute(model, tokenizer, texts, budget, limit)
    output = output or Path("heads.html")
    try:
        output.write_text(page.page(data), encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{output} cannot be written ({error.strerror}): give another file with -o") from None
    if data["maps"] in _LEFT_OUT:
        print(_LEFT_OUT[data["maps"]], file=sys.stderr)
    if not as_json:
        print(output)
