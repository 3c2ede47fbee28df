"""Kill `budgetformer export` at random moments while it replaces an export, and see that a complete export is there.

    python benchmarks/kill_export.py [--kills 100] [--seed 0]

A tiny run is exported again and again over the same directory, with two budgets in turn, and stopped by SIGKILL,
SIGTERM or SIGINT: one time in three anywhere between its start and its end, else from the moment on when it begins to
write. After every kill the directory must open, verified against its recorded hashes, answer, and be the old export or
the new one. Exits with 1 if it is not, or if anything is left over at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fuzz_runs import TEXT, command, write_rows

import budgetformer.export.run  # noqa: F401 - children are forked with all libraries loaded, so kills hit the export
from budgetformer.runs.run import Run

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
BUDGETS = ("max:0.5", "max:0.75")


def forked(work: Callable[[], str | None]) -> int:
    """Start work in a process of its own, whose exit code is 0 if it gives nothing or "exit 0..."."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            result = work()
            code = 0 if result is None or result.startswith("exit 0") else 2
        finally:
            os._exit(code)
    return child


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def check(target: Path) -> None:
    """It opens, its files are those that were written, and it answers."""
    assert Run.open(target).predict([TEXT]).labels[0] in ("good", "bad")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, ends = random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder, target = Path(name), Path(name, "export")
        rows = write_rows(folder)
        tiny = ("--preset", "tiny", "--epochs", "1", "--max-length", "32", "--set", "vocab_size=200")
        assert wait(forked(lambda: command("train", rows, "-o", folder / "run", *tiny))) == 0

        def export(budget: str) -> int:
            return forked(lambda: command("export", folder / "run", "-o", target, "--budget", budget))

        def until(child: int, moment: float, writing: bool = False) -> None:
            """Wait until then, until it writes, or until it has ended."""
            while (
                not ended(child) and time.monotonic() < moment and not (writing and (folder / ".export.tmp").exists())
            ):
                time.sleep(0.0005)

        began = time.monotonic()
        until(child := export(BUDGETS[1]), began + 600, writing=True)
        before_writing = time.monotonic() - began
        assert wait(child) == 0
        seconds = time.monotonic() - began
        print(f"one export takes {seconds:.2f} s, the last {seconds - before_writing:.2f} s of it writing")
        kills = late = 0
        while kills < options.kills:
            old, new = json.loads((target / "export.json").read_text())["dial"], BUDGETS[(kills + late) % 2]
            child, stop, began = export(new), rng.choice(SIGNALS), time.monotonic()
            if rng.random() < 1 / 3:
                until(child, began + rng.random() * seconds)
            else:
                until(child, began + 600, writing=True)
                until(child, time.monotonic() + rng.random() * 1.2 * (seconds - before_writing))
            os.kill(child, stop)  # one that has ended, and is waited for below, takes no notice
            in_time = wait(child) != 0
            kills, late = kills + in_time, late + (not in_time)
            assert wait(forked(lambda: check(target))) == 0, f"kill {kills}: no complete export"
            dial = json.loads((target / "export.json").read_text())["dial"]
            assert dial in (old, new), (dial, old, new)
            if in_time:
                ends[f"{stop.name}: {'the new' if dial == new != old else 'the old'} export"] += 1
        assert wait(export("full")) == 0  # the next export cleans up
        left = sorted(path.name for path in folder.iterdir())
    for end, count in sorted(ends.items()):
        print(f"{count:4} {end}")
    print(f"{kills} kills ({late} more came too late), a complete export after each; left: {', '.join(left)}")
    sys.exit(0 if left == ["export", "rows.csv", "run"] else 1)


if __name__ == "__main__":
    main()
