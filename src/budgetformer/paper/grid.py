"""Running cells, longest first, some at once in processes of their own; done ones are skipped, begun ones go on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from budgetformer.errors import BudgetFormerError, UsageError
from budgetformer.paper.cells import Cell, Plan
from budgetformer.paper.work import compute, make_tokenizer
from budgetformer.runs.files import named_write_errors


@dataclass(frozen=True)
class Failure:
    """A cell that could not be computed, the exit code that its error has, and where to read about it."""

    cell: Cell
    exit_code: int
    reason: str
    log: Path


@dataclass
class Progress:
    """Cells done of all, and how long the rest will take at the speed so far."""

    total: int
    done: int
    left: float
    began: float = field(default_factory=time.monotonic)
    worked: float = 0.0

    def finished(self, cell: Cell, work: float, note: str) -> None:
        self.done, self.left, self.worked = self.done + 1, self.left - work, self.worked + work
        hours = (time.monotonic() - self.began) / max(1e-9, self.worked) * max(0.0, self.left) / 3600
        tell(f"{self.done}/{self.total} cells: {cell.name} {note}, about {_duration(3600 * hours)} left")


def run_grid(plan: Plan, cells: Sequence[Cell], jobs: int = 1) -> list[Failure]:
    """Compute all cells that are not done; those that fail are returned, and the others go on."""
    unique = distinct(cells)
    todo = sorted((c for c in unique if not plan.done(c)), key=plan.work, reverse=True)
    if not todo:
        return []
    with named_write_errors(plan.folder):
        (plan.folder / "logs").mkdir(parents=True, exist_ok=True)
    with _alone(plan.folder):
        return _run(plan, unique, todo, jobs)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two grids in one folder would write the same files: the second one is refused."""
    with (folder / ".lock").open("w") as lock:
        if os.name == "posix":
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"{folder} is being computed by another process: wait for it, or give another -o"
                ) from None
        yield


def _run(plan: Plan, unique: list[Cell], todo: list[Cell], jobs: int) -> list[Failure]:
    for dataset in dict.fromkeys(cell.dataset for cell in todo):
        make_tokenizer(plan, dataset)
    progress = Progress(len(unique), len(unique) - len(todo), sum(map(plan.work, todo)))
    tell(f"{len(todo)} of {len(unique)} cells to compute, {jobs} at once, into {plan.folder / 'cells'}")
    return _in_processes(plan, todo, jobs, progress) if jobs > 1 else _here(plan, todo, progress)


def distinct(cells: Sequence[Cell]) -> list[Cell]:
    """Each cell once, by name; one name for two different cells is a mistake."""
    found: dict[str, Cell] = {}
    for cell in cells:
        assert found.setdefault(cell.name, cell) == cell, f"two cells are named {cell.name}"
    return list(found.values())


def _log(plan: Plan, cell: Cell) -> Path:
    return plan.folder / "logs" / f"{cell.name}.log"


def _here(plan: Plan, todo: list[Cell], progress: Progress) -> list[Failure]:
    failures = []
    for cell in todo:
        log, code, reason = _log(plan, cell), 0, ""
        with log.open("a", encoding="utf-8") as file, contextlib.redirect_stderr(file):
            try:
                compute(plan, cell)
            except BudgetFormerError as error:
                print(f"error: {error}", file=file)
                code, reason = error.exit_code, str(error)
        if code:
            failures.append(Failure(cell, code, reason, log))
        progress.finished(cell, plan.work(cell), f"failed, see {log}" if code else "done")
    return failures


def _in_processes(plan: Plan, todo: list[Cell], jobs: int, progress: Progress) -> list[Failure]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(max(1, cores // jobs))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }
    waiting, running, failures = list(todo), dict[subprocess.Popen[bytes], Cell](), list[Failure]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                running[_start(plan, cell, environment)] = cell
            for process in [p for p in running if p.poll() is not None]:
                cell = running.pop(process)
                log, code = _log(plan, cell), process.returncode
                if code:
                    failures.append(Failure(cell, code if code > 0 else 1, _last_line(log), log))
                progress.finished(cell, plan.work(cell), f"failed, see {log}" if code else "done")
            time.sleep(0.2)
    finally:  # interrupted: every child saves a checkpoint and ends
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failures


def _start(plan: Plan, cell: Cell, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    argument = {
        "scale": plan.scale.name, "folder": str(plan.folder), "data_dir": plan.data_dir, "cell": cell.to_json(),
        "watched": True,
    }  # fmt: skip
    with _log(plan, cell).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "budgetformer.paper.work", json.dumps(argument)],
            stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def tell(line: str) -> None:
    """A line for the user on stderr."""
    print(line, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
