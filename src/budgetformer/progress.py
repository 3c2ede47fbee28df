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
        self.total, self.quiet, self.unit = total, quiet, unit
        self._began, self._first, self._last = time.monotonic(), done, 0.0
        self._bar = Progress(
            BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"),
            console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty(),
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, completed=done)
        self._bar.start()

    def step(self, step: int, figures: dict[str, Any]) -> None:
        """Show where the work is, with some figures."""
        words = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        self._bar.update(self._task, completed=step, description=words)
        if self._bar.disable and (now := time.monotonic()) - self._last > _SECONDS_BETWEEN_LINES:
            self._last = now
            minutes, seconds = divmod(
                round((now - self._began) / max(1, step - self._first) * max(0, self.total - step)), 60
            )
            left = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
            self.log(f"{self.unit} {step}/{self.total}  {words}  about {left} left")

    def log(self, line: str) -> None:
        """A line that stays; rich prints it above its bar."""
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.stop()
