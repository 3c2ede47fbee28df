"""A folder of files on a Ray cluster: Ray Data hands out the files, every worker holds one model.

A file is scored by the same code as on one machine and has an output of its own, so the rows are the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from budgetformer.errors import BudgetFormerError, DataError, MissingExtraError, ModelError, UsageError
from budgetformer.predict.input import data_files
from budgetformer.predict.job import Predictor, Request, Summary
from budgetformer.runs.files import named_write_errors
from budgetformer.runs.run import Run

_ADDED = ("rows", "cut", "bad", "rows_now", "flops", "dense_flops")  # of files' summaries


def predict_folder(
    run: Path, request: Request, *, budget: str | None, long: str, workers: int, log: Callable[[str], None]
) -> Summary:
    """Score every file of a folder into a file of the same name in the folder `request.output`, with so many models
    at once (0: one for each CPU)."""
    folder, output = Path(request.source.data), request.output
    files = data_files(folder)
    if not files:
        raise UsageError(f"--workers {workers}: {folder} is no folder of data files: give one, or leave --workers out")
    if output is None or output.is_file() or request.shard:
        raise UsageError(f"--workers {workers} writes a folder: give it with -o, and no --shard")
    names = [file.name.removesuffix(".xz") for file in files]  # of the outputs
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{folder} holds {twice[0]} with .xz and without: their outputs have one name; move one away")
    try:
        import ray
        import ray.data
    except ImportError:
        raise MissingExtraError("ray", "ray") from None
    predictor = Predictor(Run.open(run), budget=budget, long=long)  # a bad run is better refused here than by workers
    with named_write_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    began = time.monotonic()
    tasks = [
        {"file": str(file.resolve()), "output": str((output / name).resolve())}
        for file, name in zip(files, names, strict=True)
    ]
    processors = int(ray.cluster_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
    worker: Any = _Worker
    results = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map(
        worker,
        fn_constructor_args=(str(run.resolve()), budget, long, request),
        compute=ray.data.ActorPoolStrategy(size=min(workers or processors, len(files))),
        num_cpus=1,
    )
    rows = []
    for row in results.iter_rows():
        rows.append(row)
        if not row["error"]:
            log(f"{row['file']}: {row['rows']} rows")
    if errors := [row for row in rows if row["error"]]:
        kinds = {kind.exit_code: kind for kind in (UsageError, DataError, ModelError)}
        more = f" (and {len(errors) - 1} more files failed)" if len(errors) > 1 else ""
        raise kinds.get(int(errors[0]["code"]), BudgetFormerError)(errors[0]["error"] + more)
    totals = {name: sum(row[name] for row in rows) for name in _ADDED}
    exits = np.sum([row["exits"] for row in rows if len(row["exits"])], axis=0, dtype=int).tolist() or ()
    return Summary(**totals, stages=predictor.stages, exits=exits, seconds=time.monotonic() - began)


class _Worker:
    """One model; scores one file at a call, and says what went wrong instead of raising it."""

    def __init__(self, run: str, budget: str | None, long: str, request: Request) -> None:
        self.predictor, self.request = Predictor(Run.open(run), budget=budget, long=long), request

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        source = replace(self.request.source, data=task["file"], quarantine=None)
        request, summary, message, code = replace(self.request, source=source, output=Path(task["output"])), None, "", 0
        try:
            summary = self.predictor.predict(request, lambda line: None)
        except BudgetFormerError as error:
            message, code = str(error), error.exit_code
        return {"file": task["file"], "error": message, "code": code, **asdict(summary or Summary())}
