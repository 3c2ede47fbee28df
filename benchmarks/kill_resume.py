"""kill -9 a training run at random moments, resume it each time, and compare its final weights with an unbroken run's.

    python benchmarks/kill_resume.py [--kills 20] [--seed 0]

Exits with 1 if any weight differs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

WORDS = ("film", "story", "people", "town", "music", "light", "river", "house", "night", "road")


def make_data(path: Path, rows: int = 600) -> None:
    rng = random.Random(0)
    lines = ["text,label"]
    for i in range(rows):
        words = [*rng.choices(WORDS, k=rng.randint(5, 30)), ("good", "bad")[i % 2], str(i)]
        rng.shuffle(words)
        lines.append(f"{' '.join(words)},{('pos', 'neg')[i % 2]}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def command(data: Path, run: Path) -> list[str]:
    words = ["-m", "budgetformer", "train", str(data), "-o", str(run), "--preset", "tiny", "--resume"]
    return [sys.executable, *words, "--set", "checkpoint_minutes=0.01", "--set", "epochs=4"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder / "data.csv")
        complete, broken = folder / "whole", folder / "broken"
        began = time.monotonic()
        subprocess.run(command(folder / "data.csv", complete), check=True, capture_output=True)
        duration = time.monotonic() - began
        print(f"an unbroken run takes {duration:.0f} s")
        kills = chains = 0
        while kills < options.kills or broken.exists():
            child = subprocess.Popen(
                command(folder / "data.csv", broken), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            moment = rng.uniform(0.0, 1.0) * duration if kills < options.kills else None
            try:
                if child.wait(timeout=moment) != 0:
                    sys.exit(f"a resumed run failed with exit code {child.returncode}")
            except subprocess.TimeoutExpired:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
                kills += 1
                steps = sorted(p.name for p in (broken / "checkpoints").glob("step-*"))
                print(f"  kill {kills}: checkpoints {steps}", flush=True)
                continue
            compare(complete, broken)
            chains += 1
            print("  finished with the same weights", flush=True)
            shutil.rmtree(broken)
        print(f"{kills} kills, {chains} finished runs, all bit for bit like the unbroken one")


def compare(complete: Path, broken: Path) -> None:
    a, b = (load_file(run / "checkpoints" / "last" / "model.safetensors") for run in (complete, broken))
    if different := [key for key in a if not a[key].equal(b[key])]:
        sys.exit(f"{len(different)} of {len(a)} weights differ, the first is {different[0]}")


if __name__ == "__main__":
    main()
