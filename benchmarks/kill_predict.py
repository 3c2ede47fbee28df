"""Kill `budgetformer predict` at random moments, resume it each time, and compare with the output of one go.

    python benchmarks/kill_predict.py [--kills 100] [--rows 40000] [--seed 0]

SIGKILL, SIGTERM and SIGINT take turns, over CSV, compressed JSON lines and Parquet. The processes to kill are forked
from one that has imported everything, so that signals come while rows are read, scored, written and joined. Exits with
1 if a byte of an output or of its bad rows differs, if something is left behind, or if a signal that can be caught does
not end the process with exit code 130.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.context import ForkProcess
from pathlib import Path

from scoring import make_run, write_rows

from budgetformer.cli import main as command_line

FORMATS = ("csv", "jsonl.gz", "parquet")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Job:
    """One output that is begun, killed and resumed."""

    def __init__(self, folder: Path, name: str) -> None:
        self.output, self.state, self.bad = (folder / f"{name}{end}" for end in ("", ".progress.json", ".bad.jsonl"))
        words = ["predict", str(folder / "run"), str(folder / "rows.csv"), "-o", str(self.output)]
        self.words = ["budgetformer", *words, "--bad-rows", "skip", "--resume"]

    def run(self) -> None:
        """Let it end, in a process that imports everything by itself."""
        subprocess.run([sys.executable, "-m", *self.words], check=True, capture_output=True)

    def kill(self, which: signal.Signals, writes: int, later: float) -> bool:
        """Start it and send a signal some seconds after so many writes of its progress; whether it came in time."""
        child = multiprocessing.get_context("fork").Process(target=_forked, args=(self.words,))
        child.start()
        self._wait(child, writes)
        child.join(later)
        if child.is_alive() and child.pid:
            os.kill(child.pid, which)
        child.join()
        caught = {0, 130} if which is not signal.SIGKILL else {0}
        ended = self.output.exists()  # when Python ends nobody catches signals
        if child.exitcode not in caught and not (child.exitcode == -which and (ended or which is signal.SIGKILL)):
            sys.exit(f"{self.output.name}: exit code {child.exitcode} after {which.name}")
        return child.exitcode != 0

    def _wait(self, child: ForkProcess, writes: int) -> None:
        last = self._written()
        while writes and child.is_alive():
            time.sleep(0.005)
            if (now := self._written()) != last:
                last, writes = now, writes - 1

    def _written(self) -> int:
        try:
            return self.state.stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def _forked(words: list[str]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    sys.argv = words
    command_line()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, kills, outputs = random.Random(options.seed), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder / "run", "tiny")
        write_rows(folder / "rows.csv", options.rows, 0)
        with (folder / "rows.csv").open("a") as file:
            file.write("a row,of,too many fields\n")
        for ending in FORMATS:
            Job(folder, f"one-go.{ending}").run()
        while kills.total() < options.kills:
            ending = FORMATS[outputs.total() % len(FORMATS)]
            killed, one_go = Job(folder, f"killed.{ending}"), Job(folder, f"one-go.{ending}")
            while not killed.output.exists() and kills.total() < options.kills:
                which = SIGNALS[kills.total() % len(SIGNALS)]
                kills[which.name] += killed.kill(which, rng.randint(0, 3), rng.uniform(0, 0.5))
            killed.run()
            for path, expected in ((killed.output, one_go.output), (killed.bad, one_go.bad)):
                if path.read_bytes() != expected.read_bytes():
                    sys.exit(f"{path.name} differs from that of one go")
                path.unlink()
            if left := [path.name for path in folder.glob("*killed*")]:
                sys.exit(f"left behind: {left}")
            outputs[ending] += 1
            print(f"  {ending} is the same, {kills.total()} kills so far", flush=True)
    sent = ", ".join(f"{count} {name}" for name, count in sorted(kills.items()))
    written = ", ".join(f"{count} {ending}" for ending, count in outputs.items())
    print(f"{kills.total()} kills ({sent}), {outputs.total()} outputs ({written}), all byte for byte those of one go")


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork must not inherit its threads
    main()
