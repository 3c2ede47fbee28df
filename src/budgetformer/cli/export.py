"""budgetformer export: a finished run as an ONNX graph."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from budgetformer.cli import app


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The directory to write.")],
    format_: Annotated[str, typer.Option("--format", help="onnx.")] = "onnx",
    budget: Annotated[str, typer.Option(help="The dial: learned, full, fixed:X or max:X.")] = "learned",
    int8: Annotated[bool, typer.Option("--int8", help="Quantise the linear layers' weights; gates stay.")] = False,
    rows: Annotated[
        str | None, typer.Option(metavar="DATA", help="Rows to check on (default: what the run kept back).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Write RUN as an ONNX graph that skips heads, once it agrees with the model on real rows."""
    from budgetformer.cli.show import print_json, quiet_libraries
    from budgetformer.errors import UsageError

    if format_ != "onnx":
        raise UsageError(f"--format {format_!r}: give onnx")
    quiet_libraries()
    from budgetformer.runs.run import Run

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result = Run.open(run).export(output, budget=budget, int8=int8, rows=rows, log=say)
    print_json(result) if as_json else _print(result, output)


def _print(result: dict[str, Any], output: Path) -> None:
    checked, int8 = result["verification"], result["int8"]
    megabytes = result["bytes"] / 1e6
    print(f"{output / 'model.onnx'}: opset {result['opset']}, {megabytes:.1f} MB, budget {result['dial']}")
    undecided = checked["undecided_rows"]
    print(
        f"checked on {checked['source']}: labels equal, logits within {checked['largest_difference']:.1e}, "
        f"k/H {checked['k_over_h']:.3f}"
        + (f"; {undecided} rows left out whose heads hang on the last bits of a number" if undecided else "")
    )
    if int8:
        print(f"int8: {int8['labels_changed']} labels changed, logits within {int8['largest_difference']:.1e}, "
              f"{megabytes:.1f} MB of {int8['bytes_full_precision'] / 1e6:.1f}")  # fmt: skip
        if "metric" in int8:
            print(f"int8: {int8['metric']} {int8['score']:.4f}, in full precision {int8['score_full_precision']:.4f} "
                  f"({int8['score'] - int8['score_full_precision']:+.4f})")  # fmt: skip
