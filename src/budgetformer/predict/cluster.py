"""A folder of files on a Ray cluster: Ray Data hands out the files, every worker holds one model.

A file is scored by the same code as on one machine and has an output of its own, so the rows are the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from budgetformer.errors import BudgetFormerError, DataError, MissingExtraError, ModelError, UsageError
from budgetformer.predict.input import data_files
from budgetformer.predict.job import Predictor, Request, Summary
from budgetformer.runs.files import named_write_errors
from budgetformer.runs.run import Run


def predict_folder(
    run: Path, request: Request, *, budget: str | None, long: str, workers: int | None, say: Callable[[str], None]
) -> Summary:
    """Score every file of a folder into a file of the same name in the folder `request.output`."""
    folder, output = Path(request.source.data), request.output
    files = data_files(folder)
    if not files:
        raise UsageError(f"--engine ray: {folder} is no folder of data files: give one, or use --engine local")
    if output is None or output.is_file() or request.shard:
        raise UsageError("--engine ray writes a folder: give it with -o, and no --shard")
    try:
        import ray
        import ray.data
    except ImportError:
        raise MissingExtraError("ray", "ray") from None
    Predictor(Run.open(run), budget=budget, long=long)  # a bad run is better refused here than by every worker
    with named_write_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    began = time.monotonic()
    tasks = [{"file": str(file.resolve()), "output": str((output / _name(file)).resolve())} for file in files]
    processors = int(ray.cluster_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
    worker: Any = _Worker
    done = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map(
        worker,
        fn_constructor_args=(str(run.resolve()), budget, long, request),
        compute=ray.data.ActorPoolStrategy(size=min(workers or processors, len(files))),
        num_cpus=1,
    )
    total = Summary(0, 0, 0, 0, 0.0)
    errors: list[dict[str, Any]] = []
    for row in done.iter_rows():
        if row["error"]:
            errors.append(row)
            continue
        say(f"{row['file']}: {row['rows']} rows")
        sums = {name: getattr(total, name) + int(row[name]) for name in ("rows", "cut", "bad", "rows_now")}
        total = replace(total, **sums)
    if errors:
        kinds = {kind.exit_code: kind for kind in (UsageError, DataError, ModelError)}
        more = f" (and {len(errors) - 1} more files failed)" if len(errors) > 1 else ""
        raise kinds.get(int(errors[0]["code"]), BudgetFormerError)(errors[0]["error"] + more)
    return replace(total, seconds=time.monotonic() - began)


def _name(file: Path) -> str:
    return file.name.removesuffix(".xz")


class _Worker:
    """One model; scores one file at a call, and says what went wrong instead of raising it."""

    def __init__(self, run: str, budget: str | None, long: str, request: Request) -> None:
        self.predictor, self.request = Predictor(Run.open(run), budget=budget, long=long), request

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        source = replace(self.request.source, data=task["file"], quarantine=None)
        request = replace(self.request, source=source, output=Path(task["output"]))
        result = {"file": task["file"], "error": "", "code": 0, "rows": 0, "cut": 0, "bad": 0, "rows_now": 0}
        try:
            summary = self.predictor.predict(request, lambda line: None)
        except BudgetFormerError as error:
            return {**result, "error": str(error), "code": error.exit_code}
        if summary is None:
            return result
        return {**result, **{name: getattr(summary, name) for name in ("rows", "cut", "bad", "rows_now")}}
