"""budgetformer bench: the clock, not the count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from budgetformer.cli import app
from budgetformer.errors import UsageError


@app.command()
def bench(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run with its dense twin.")] = None,
    data: Annotated[
        str | None, typer.Argument(metavar="[DATA]", help="With --what engines: texts (default: RUN's held-out rows).")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch sizes (default: 1 8 32).", min=1)] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Lengths in tokens (default: 64 256 512).", min=1, max=8192)
    ] = None,
    k: Annotated[list[int] | None, typer.Option("-k", help="Heads that run (default: 1 2 4 and all).")] = None,
    shape: Annotated[str, typer.Option(help="The model's width, heads of a layer and layers.")] = "768x8x4",
    what: Annotated[str, typer.Option(help="attention, model, memory, all, units, onnx, or with RUN engines.")] = "all",
    texts: Annotated[int, typer.Option(help="With RUN: how many of its texts.", min=1)] = 2000,
    carbon: Annotated[
        str | None, typer.Option(help="With RUN: energy and carbon, by a country's mix (FRA) or g CO2 per kWh (56).")
    ] = None,
    dense: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="With --what engines: the dense model."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Time selective execution against dense rivals: by itself, or a RUN from text to label."""
    from budgetformer.cli.show import print_bench, print_engines, print_json, print_run_bench

    show: Callable[[dict[str, Any]], None]
    if run is None:
        if what == "engines" or dense:
            raise UsageError("--what engines and --dense are for a RUN: give its directory")
        result, show = _by_itself(what, shape, batch or [1, 8, 32], length or [64, 256, 512], k), print_bench
    else:
        from budgetformer.bench import run_bench
        from budgetformer.runs.run import Run

        if what == "engines":
            from budgetformer.speed import compare_engines

            other = None if dense is None else Run.open(dense)
            result, show = compare_engines(Run.open(run), data, dense=other, texts=texts), print_engines
        elif data is not None:
            raise UsageError(f"{data}: texts are for --what engines; a run is timed on its held-out rows")
        else:
            result, show = run_bench(Run.open(run), texts=texts, carbon=carbon), print_run_bench
    print_json(result) if as_json else show(result)


def _by_itself(what: str, shape: str, batches: list[int], lengths: list[int], k: list[int] | None) -> dict[str, Any]:
    """Times and memory of random models of a shape."""
    from budgetformer import bench as benches
    from budgetformer.cli.show import log
    from budgetformer.cost.flops import Shape
    from budgetformer.cost.measure import MemoryUnmeasurableError
    from budgetformer.runs.provenance import environment

    if what not in ("attention", "model", "memory", "all", "units", "onnx"):
        raise UsageError(f"--what {what!r}: give attention, model, memory, all, units or onnx")
    try:
        width, heads, layers = map(int, shape.split("x"))
    except ValueError:
        raise UsageError(f"--shape {shape!r}: give WIDTHxHEADSxLAYERS, such as 768x8x4") from None
    sizes = Shape(width=width, heads=heads, layers=layers, inner=4 * width)
    benches.model_config(sizes)  # refuse what cannot be built before anything is timed
    ks = k or sorted({n for n in (1, 2, 4, heads) if n <= heads})
    if wrong := [n for n in ks if not 1 <= n <= heads]:
        raise UsageError(f"-k {wrong[0]}: give numbers from 1 to {heads}, the heads of a layer")
    if what == "units":
        return {"units": list(benches.unit_rows(sizes, batches, lengths)), "environment": environment()}
    rows: list[dict[str, Any]] = []
    for part in ("attention", "model") if what in ("all", "onnx") else {what} - {"memory"}:
        for row in benches.speed_rows(part, sizes, batches, lengths, ks, "onnx" if what == "onnx" else "torch"):
            rows.append(row)
            log("{what} {batch}x{length} k={k}: {speedup:.2f}x of {ideal:.2f}".format_map(row))
    memory: list[dict[str, Any]] = []
    if what in ("memory", "all"):
        try:
            memory = [benches.memory_row(sizes, 32, max(lengths), n) for n in (0, *ks)]
        except MemoryUnmeasurableError as error:
            log(f"warning: memory is not measured: {error}")
    return {"rows": rows, "memory": memory, "environment": environment()}
