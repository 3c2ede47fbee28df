"""Kill `budgetformer predict` at random moments, resume it each time, and compare with the output of one go.

    python benchmarks/kill_predict.py [--kills 100] [--rows 20000] [--seed 0]

SIGKILL, SIGTERM and SIGINT take turns, over CSV, compressed JSON lines and Parquet; most of them come while rows are
scored or joined, some while the program starts. Exits with 1 if a byte of an output or of its bad rows differs, if
something is left behind, or if a signal that can be caught does not end the process with exit code 130.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from scoring import make_run, write_rows

FORMATS = ("csv", "jsonl.gz", "parquet")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
EARLY = 0.1  # of the kills come while the program starts


class Job:
    """One output that is begun, killed and resumed."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.output = folder, folder / name
        self.state, self.bad = folder / f"{name}.progress.json", folder / f"{name}.bad.jsonl"

    def start(self) -> subprocess.Popen[bytes]:
        words = ["predict", str(self.folder / "run"), str(self.folder / "rows.csv"), "-o", str(self.output)]
        command = [sys.executable, "-m", "budgetformer", *words, "--bad-rows", "skip", "--resume"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def run(self) -> float:
        """Let it end; seconds until it has begun to score."""
        began = time.monotonic()
        child = self.start()
        self.wait(child, 1)
        started = time.monotonic() - began
        if child.wait() != 0:
            sys.exit(f"{self.output.name}: predict failed with exit code {child.returncode}")
        return started

    def wait(self, child: subprocess.Popen[bytes], writes: int) -> None:
        """Until it has written its progress so many times, or ended."""
        last = self._written()
        while writes and child.poll() is None:
            time.sleep(0.005)
            if (now := self._written()) != last:
                last, writes = now, writes - 1

    def _written(self) -> int:
        try:
            return self.state.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def kill(self, which: signal.Signals, early: float | None, writes: int, later: float) -> bool:
        """Start it and send a signal, `early` seconds after the start or a moment after some writes of its progress;
        whether that came before the end."""
        child = self.start()
        try:
            if early is None:
                self.wait(child, writes)
            child.wait(timeout=later if early is None else early)
        except subprocess.TimeoutExpired:
            child.send_signal(which)
        code = child.wait()
        uncaught = which is signal.SIGKILL or early is not None or self.output.exists()  # Python itself starts or ends
        if code not in (0, 130) and not (uncaught and code == -which):
            sys.exit(f"{self.output.name}: exit code {code} after {which.name}")
        return code != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rows", type=int, default=20_000)
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
            start = Job(folder, f"one-go.{ending}").run()
        while kills.total() < options.kills:
            ending = FORMATS[outputs.total() % len(FORMATS)]
            killed, one_go = Job(folder, f"killed.{ending}"), Job(folder, f"one-go.{ending}")
            while not killed.output.exists() and kills.total() < options.kills:
                which = SIGNALS[kills.total() % len(SIGNALS)]
                early = rng.uniform(0, start) if rng.random() < EARLY else None
                kills[which.name] += killed.kill(which, early, rng.randint(1, 4), rng.uniform(0, 0.3))
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
    main()
