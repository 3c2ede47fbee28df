"""`budgetformer check` on a large generated CSV file: seconds and peak memory.

python benchmarks/check_memory.py [--gigabytes 2]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = "the film was a story of some people in town with music and light and a long road home".split()


def write(path: Path, size: int) -> int:
    """A CSV of about `size` bytes, no two rows the same. Returns the number of rows."""
    rows = 0
    with path.open("w", encoding="utf-8") as file:
        file.write("text,label\n")
        while file.tell() < size:
            chunk = []
            for _ in range(10_000):
                rows += 1
                shift = rows % len(WORDS)
                chunk.append(
                    f'"{" ".join(WORDS[shift:] + WORDS[:shift])}, number {rows}",{("a", "b", "c")[rows % 3]}\n'
                )
            file.write("".join(chunk))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.csv"
        rows = write(path, int(options.gigabytes * 1e9))
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "budgetformer", "check", str(path)], check=True, stdout=subprocess.DEVNULL
        )
        seconds = time.monotonic() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"{path.stat().st_size / 1e9:.1f} GB, {rows:,} rows: {seconds:.0f} s, peak {peak:.0f} MiB")


if __name__ == "__main__":
    main()
