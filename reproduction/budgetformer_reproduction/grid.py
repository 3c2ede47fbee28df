"""Running cells, longest first, some at once in processes of their own; done ones are skipped, begun ones go on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from budgetformer.cli.process import available_cpus
from budgetformer.errors import BudgetFormerError
from budgetformer.runs.files import locked, named_write_errors
from budgetformer_reproduction.cell import compute, make_tokenizer
from budgetformer_reproduction.cells import Cell, Plan


class GridError(BudgetFormerError):
    """Some cells failed; the exit code is the first one's."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        missing = "; ".join(f"{f.cell.name} ({f.reason.removeprefix('error: ')}; log: {f.log})" for f in failures)
        super().__init__(f"{len(failures)} cells are missing from the results: {missing}")
        self.exit_code = failures[0].exit_code


@dataclass(frozen=True)
class Failure:
    """A cell that could not be computed, the exit code that its error has, and where to read about it."""

    cell: Cell
    exit_code: int
    reason: str
    log: Path


class Progress:
    """The cells that are left, those that failed, and how long the rest will take at the speed so far."""

    def __init__(self, plan: Plan, total: int, todo: Sequence[Cell]) -> None:
        self.plan, self.total, self.left = plan, total, list(todo)
        self.work, self.began = sum(map(plan.work, todo)), time.monotonic()
        self.failures: list[Failure] = []

    def finished(self, cell: Cell, exit_code: int = 0, reason: str = "") -> None:
        log = self.plan.log(cell)
        if exit_code:
            self.failures.append(Failure(cell, exit_code, reason, log))
        self.left.remove(cell)
        left = sum(map(self.plan.work, self.left))
        seconds = (time.monotonic() - self.began) * left / max(1e-9, self.work - left)
        hours, minutes = divmod(round(seconds / 60), 60)
        rest = f"{hours} h {minutes} min" if hours else f"{minutes} min"
        words = f"failed, see {log}" if exit_code else "done"
        tell(f"{self.total - len(self.left)}/{self.total} cells: {cell.name} {words}, about {rest} left")


def run_grid(plan: Plan, cells: Sequence[Cell], jobs: int = 1) -> list[Failure]:
    """Compute all cells that are not done; those that fail are returned, and the others go on."""
    todo = sorted((c for c in cells if not plan.done(c)), key=plan.work, reverse=True)
    if not todo:
        return []
    with named_write_errors(plan.folder):
        (plan.folder / "logs").mkdir(parents=True, exist_ok=True)
    with locked(plan.folder, "computing"):
        for dataset in dict.fromkeys(cell.dataset for cell in todo):
            make_tokenizer(plan, dataset)
        tell(f"{len(todo)} of {len(cells)} cells to compute, {jobs} at once, into {plan.folder / 'cells'}")
        progress = Progress(plan, len(cells), todo)
        if jobs > 1:
            _in_processes(plan, todo, jobs, progress)
        else:
            _here(plan, todo, progress)
    return progress.failures


def _here(plan: Plan, todo: list[Cell], progress: Progress) -> None:
    for cell in todo:
        code, reason = 0, ""
        with plan.log(cell).open("a", encoding="utf-8") as file, contextlib.redirect_stderr(file):
            try:
                compute(plan, cell)
            except BudgetFormerError as error:
                print(f"error: {error}", file=file)
                code, reason = error.exit_code, str(error)
        progress.finished(cell, code, reason)


def _in_processes(plan: Plan, todo: list[Cell], jobs: int, progress: Progress) -> None:
    waiting, running = list(todo), dict[subprocess.Popen[bytes], Cell]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                running[_start(plan, cell, jobs)] = cell
            for process in [p for p in running if p.poll() is not None]:
                cell = running.pop(process)
                lines = plan.log(cell).read_text(encoding="utf-8", errors="replace").strip().splitlines()
                code = process.returncode if process.returncode >= 0 else 1
                progress.finished(cell, code, lines[-1] if lines else "no output")
            time.sleep(0.2)
    finally:  # interrupted: every child saves a checkpoint and ends
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _start(plan: Plan, cell: Cell, jobs: int) -> subprocess.Popen[bytes]:
    """Compute a cell in a process of its own, which has its share of the cores."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(max(1, available_cpus() // jobs)))
    job = {"scale": plan.scale.name, "folder": str(plan.folder), "data_dir": plan.data_dir, "cell": asdict(cell),
           "precision": plan.precision}  # fmt: skip
    with plan.log(cell).open("ab") as log:
        environment = {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false"}
        return subprocess.Popen(
            [sys.executable, "-m", "budgetformer_reproduction.cell", json.dumps(job)],
            stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def tell(line: str) -> None:
    """A line for the user on stderr."""
    print(line, file=sys.stderr, flush=True)
