"""budgetformer export: a finished run as an ONNX graph, or as a static torch model with its best heads."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from budgetformer.cli import app


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The directory to write.")],
    format_: Annotated[str, typer.Option("--format", help="onnx; torch: a --base run with its best heads.")] = "onnx",
    budget: Annotated[
        str | None,
        typer.Option(help="onnx: learned, full, fixed:X or max:X; torch: the share of all heads that are kept (0.5)."),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantise the linear layers' weights; gates stay.")] = False,
    rows: Annotated[
        str | None, typer.Option(metavar="DATA", help="Rows to check on (default: what the run kept back).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Write RUN as an ONNX graph that skips heads, once it agrees with the model on real rows; or as a static model."""
    from budgetformer.cli.show import print_json
    from budgetformer.runs.run import Run

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result = Run.open(run).export(output, format=format_, budget=budget, int8=int8, rows=rows, log=log)
    if as_json:
        print_json(result)
        return
    (_print_graph if format_ == "onnx" else _print_frozen)(result, output)
    if format_ == "torch" and result["heads_by_layer"] is None:
        print(f"next, in Python: transformers.pipeline('text-classification', {str(output)!r})")
    else:
        print(f"next: {shlex.join(['budgetformer', 'predict', str(output), 'new.csv', '-o', 'answers.csv'])}")


def _print_graph(result: dict[str, Any], output: Path) -> None:
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


def _print_frozen(result: dict[str, Any], output: Path) -> None:
    by_layer = result["heads_by_layer"]
    if by_layer is None:
        print(f"{output}: all heads; an ordinary {result['architecture']} that loads without budgetformer")
        return
    total = result["layers"] * result["heads"]
    print(f"{output}: {sum(by_layer)} of {total} heads, by layer {' '.join(map(str, by_layer))}")
    print("It loads with budgetformer only: its architecture's own code cannot hold fewer heads.")
