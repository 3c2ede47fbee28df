"""Progress on stderr: a rich bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 15.0


class View:
    """Shows how long work goes, in steps or another `unit`. `quiet` shows nothing (all processes but the first)."""

    def __init__(self, total: int, done: int = 0, *, quiet: bool = False, unit: str = "step") -> None:
        self.quiet, self.unit = quiet, unit
        self.total = total
        self._began, self._first, self._last = time.monotonic(), done, 0.0
        self._progress: Progress | None = None
        if not quiet and sys.stderr.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
            self._task = self._progress.add_task("", total=total, completed=done)

    def step(self, step: int, figures: dict[str, Any]) -> None:
        """Tell about one step; `figures` are formatted only when they are shown."""
        if self.quiet:
            return
        if self._progress:
            self._progress.update(self._task, completed=step, description=_words(figures))
        elif (now := time.monotonic()) - self._last > _SECONDS_BETWEEN_LINES:
            self._last = now
            left = (now - self._began) / max(1, step - self._first) * max(0, self.total - step)
            self.say(f"{self.unit} {step}/{self.total}  {_words(figures)}  about {_duration(left)} left")

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.quiet:
            return
        if self._progress:
            self._progress.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._progress:
            self._progress.stop()


def _words(figures: dict[str, Any]) -> str:
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
