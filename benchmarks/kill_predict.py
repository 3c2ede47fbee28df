"""kill -9 `budgetformer predict` at random moments, resume it each time, and compare with the output of one go.

    python benchmarks/kill_predict.py [--kills 20] [--rows 20000] [--seed 0]

Exits with 1 if a byte differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scoring import make_run, write_rows

FORMATS = ("csv", "jsonl", "jsonl.gz", "parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder / "run", "tiny")
        write_rows(folder / "rows.csv", options.rows, 0)

        def command(output: Path) -> list[str]:
            words = ["predict", str(folder / "run"), str(folder / "rows.csv"), "-o", str(output), "--resume"]
            return [sys.executable, "-m", "budgetformer", *words]

        duration = 0.0
        for ending in FORMATS:
            began = time.monotonic()
            subprocess.run(command(folder / f"whole.{ending}"), check=True, capture_output=True)
            duration = max(duration, time.monotonic() - began)
        print(f"one go takes {duration:.0f} s")
        kills = finished = 0
        while kills < options.kills:
            ending = FORMATS[finished % len(FORMATS)]
            broken = folder / f"broken.{ending}"
            while not broken.exists():
                child = subprocess.Popen(command(broken), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                moment = rng.uniform(0.2, 1.0) * duration if kills < options.kills else None
                try:
                    if child.wait(timeout=moment) != 0:
                        sys.exit(f"a resumed run failed with exit code {child.returncode}")
                except subprocess.TimeoutExpired:
                    os.kill(child.pid, signal.SIGKILL)
                    child.wait()
                    kills += 1
                    left = sorted(path.name for path in folder.glob("broken*"))
                    print(f"  kill {kills}: {left}", flush=True)
            subprocess.run(command(broken), check=True, capture_output=True)  # a kill may have come after the end
            if broken.read_bytes() != (folder / f"whole.{ending}").read_bytes():
                sys.exit(f"{broken.name} differs from the output of one go")
            finished += 1
            print(f"  {broken.name} is the same", flush=True)
            broken.unlink()
        print(f"{kills} kills, {finished} outputs, all byte for byte those of one go")


if __name__ == "__main__":
    main()
