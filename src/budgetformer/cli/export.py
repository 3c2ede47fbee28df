"""budgetformer export: a finished run as ONNX or OpenVINO graphs, or as a static torch model with its best heads."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from budgetformer.cli import app
from budgetformer.errors import UsageError


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The directory to write.")],
    format_: Annotated[
        str, typer.Option("--format", help="onnx; openvino; torch: a --base run with its best heads.")
    ] = "onnx",
    budget: Annotated[
        str | None,
        typer.Option(help="What it answers with by default, as for predict; torch: the share of heads (0.5)."),
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Linear layers in int8, with scales from held-out rows; what decides stays.")
    ] = False,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="With --int8: each batch has its own scales, so answers depend on it.")
    ] = False,
    rows: Annotated[
        str | None, typer.Option(metavar="DATA", help="Rows to check on (default: the run's held-out rows).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Write RUN as graphs, one for each stage, once they agree with it on real rows; or as a torch model."""
    from budgetformer.cli.show import log, print_json
    from budgetformer.runs.run import Run

    if dynamic and not int8:
        raise UsageError("--dynamic is for --int8: give both, or leave it out")
    precision = "dynamic" if dynamic else int8
    result = Run.open(run).export(output, format=format_, budget=budget, int8=precision, rows=rows, log=log)
    if as_json:
        print_json(result)
        return
    (_print_frozen if format_ == "torch" else _print_graphs)(result, output)
    if format_ == "torch" and result["heads_by_layer"] is None:
        print(f"next, in Python: transformers.pipeline('text-classification', {str(output)!r})")
    else:
        print(f"next: {shlex.join(['budgetformer', 'predict', str(output), 'new.csv', '-o', 'answers.csv'])}")


def _print_graphs(result: dict[str, Any], output: Path) -> None:
    checked, int8 = result["verification"], result["int8"]
    files, megabytes = ", ".join(graph["file"] for graph in result["graphs"]), result["bytes"] / 1e6
    print(f"{output}: {files}; {result['precision']}, opset {result['opset']}, {megabytes:.1f} MB, budget "
          f"{result['dial']}")  # fmt: skip
    undecided = checked["undecided_rows"]
    print(
        f"checked on {checked['source']}: labels equal, logits within {checked['largest_difference']:.1e}, "
        f"k/H {checked['k_over_h']:.3f}"
        + (f"; {undecided} rows left out whose heads hang on the last bits of a number" if undecided else "")
    )
    if checked["exits"]:
        _print_changes(f"leaving early ({checked['exits']['flops_ratio']:.0%} of the cost)", checked["exits"])
    if int8:
        _print_changes(f"int8 ({megabytes:.1f} MB of {int8['bytes_full_precision'] / 1e6:.1f})", int8)


def _print_changes(what: str, changes: dict[str, Any]) -> None:
    print(f"{what}: {changes['labels_changed']} of {changes['rows']} labels changed, logits within "
          f"{changes['largest_difference']:.1e}")  # fmt: skip
    if "metric" in changes:
        difference = changes["score"] - changes["score_before"]
        print(f"{what}: {changes['metric']} {changes['score']:.4f}, without {changes['score_before']:.4f} "
              f"({difference:+.4f})")  # fmt: skip


def _print_frozen(result: dict[str, Any], output: Path) -> None:
    by_layer = result["heads_by_layer"]
    if by_layer is None:
        print(f"{output}: all heads; an ordinary {result['architecture']} that loads without budgetformer")
        return
    for name, units in (("heads", "heads"), ("groups", "feed-forward groups")):
        if (by_layer := result[f"{name}_by_layer"]) is not None:
            total = result["layers"] * result[name]
            print(f"{output}: {sum(by_layer)} of {total} {units}, by layer {' '.join(map(str, by_layer))}")
    print("It loads with budgetformer only: its architecture's own code cannot hold fewer heads.")
