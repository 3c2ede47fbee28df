"""End a training run at random moments, resume it each time, and compare what it comes to with an unbroken run's.

    python benchmarks/kill_resume.py [--kills 100] [--seed 0]

Ends it by SIGKILL, SIGTERM or SIGINT, from the moment on that the data is read until the run is done. Exits with 1 if a
file of the finished run differs by one byte, or if a process ends in another way than its signal asks for.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

WORDS = ("film", "story", "people", "town", "music", "light", "river", "house", "night", "road")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
FILES = ("model.safetensors", "config.json", "tokenizer.json", "evaluation.json", "training_rows.safetensors",
         "checkpoints/last/model.safetensors")  # fmt: skip


def make_data(path: Path, rows: int = 600) -> None:
    rng = random.Random(0)
    lines = ["text,label"]
    for i in range(rows):
        words = [*rng.choices(WORDS, k=rng.randint(5, 30)), ("good", "bad")[i % 2], str(i)]
        rng.shuffle(words)
        lines.append(f"{' '.join(words)},{('pos', 'neg')[i % 2]}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


class Process:
    """`budgetformer train --resume`, from its first line of output on: then it has imported everything."""

    def __init__(self, data: Path, run: Path) -> None:
        words = ["train", data, "-o", run, "--preset", "tiny", "--epochs", 4, "--set", "checkpoint_minutes=0.01"]
        self.child = subprocess.Popen(
            [sys.executable, "-m", "budgetformer", *map(str, words), "--resume"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.child.stderr
        self.output = self.child.stderr.readline()

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, or None if it still runs after so long."""
        try:
            self.output += self.child.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            return None
        return self.child.returncode

    def end(self, number: signal.Signals) -> None:
        self.child.send_signal(number)
        code = self.wait()
        expected = (-signal.SIGKILL,) if number == signal.SIGKILL else (130, 0, -number)  # it may be done just then
        if code not in expected:
            sys.exit(f"{number.name} ended the run with {code}: {self.output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, ends = random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(data := folder / "data.csv")
        unbroken, broken = folder / "unbroken", folder / "broken"
        process, began = Process(data, unbroken), time.monotonic()
        if process.wait():
            sys.exit(process.output)
        duration, finished = time.monotonic() - began, 0
        print(f"an unbroken run takes {duration:.1f} s", flush=True)
        while ends.total() < options.kills or broken.exists():
            process = Process(data, broken)
            # Most ends come early, so that a run is ended many times before it is done.
            moment = duration * rng.random() ** 2 if ends.total() < options.kills else None
            code = process.wait(moment)
            if code is None:
                number = rng.choice(SIGNALS)
                process.end(number)
                ends[number.name] += 1
                continue
            if code:
                sys.exit(f"a resumed run failed with exit code {code}: {process.output}")
            for file in FILES:
                if (unbroken / file).read_bytes() != (broken / file).read_bytes():
                    sys.exit(f"{file} differs from the unbroken run's")
            finished += 1
            print(f"{ends.total()} ends: {finished} finished runs, byte for byte the same", flush=True)
            shutil.rmtree(broken)
    print(f"{', '.join(f'{count} {name}' for name, count in ends.items())}: {finished} finished runs, no byte differs")


if __name__ == "__main__":
    main()
