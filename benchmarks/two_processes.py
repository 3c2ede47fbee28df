"""Two processes on one machine: does each still get its share of what one gets alone?

    python benchmarks/two_processes.py [--seconds 20] [--repeat 3] [--what train-tiny train-small serve] [--suite]

Trains and serves alone and twice at once, with what the commands choose by themselves, and alone as torch would choose
(all cores, threads that spin while they wait). Rates are medians. Exits with 1 if a command alone is more than a tenth
slower than with torch's choice, or if one of two gets less than 0.4 of what it gets alone. `--suite` also times the
test suite on two cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WORDS = "the film was a story of some people in town with music and light and a long road home to sea".split()
# What libgomp does by itself; setting it keeps the commands from choosing.
TORCH = {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": str(os.cpu_count())}
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


def environment(changes: dict[str, str]) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name not in CHOSEN}, **changes}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "budgetformer", *map(str, words)]


def write_rows(file: Path, rows: int) -> None:
    rng = random.Random(0)
    lines = [f"{' '.join(rng.choices(WORDS, k=rng.randint(8, 40)))},{number % 2}" for number in range(rows)]
    file.write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")


class Train:
    """Tokens a second of training, as run.json tells them."""

    def __init__(self, folder: Path, preset: str, seconds: float) -> None:
        self.folder, self.preset = folder, preset
        self.data = folder / f"{preset}.csv"
        write_rows(self.data, rows=int(seconds * {"tiny": 1000, "small": 250}[preset]))  # of two, about so long

    def rate(self, name: str, changes: dict[str, str]) -> float:
        out = self.folder / f"{self.preset}-{name}-{time.monotonic_ns()}"
        words = ("train", self.data, "--preset", self.preset, "--epochs", 1, "-o", out)
        subprocess.run(command(*words), check=True, capture_output=True, env=environment(changes))
        return float(json.loads((out / "run.json").read_text(encoding="utf-8"))["training"]["tokens_per_second"])


class Serve:
    """Texts a second that a service answers, asked by one client for eight texts at a time."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.run, self.seconds = folder / "served", seconds
        data = folder / "served.csv"
        write_rows(data, rows=200)
        words = ("train", data, "--preset", "small", "--epochs", 1, "-o", self.run)
        subprocess.run(command(*words), check=True, capture_output=True, env=environment({}))
        texts = [line.partition(",")[0] for line in data.read_text(encoding="utf-8").splitlines()[1:9]]
        self.body = json.dumps({"texts": texts}).encode()

    def rate(self, name: str, changes: dict[str, str]) -> float:
        words = command("serve", self.run, "--port", 0)
        server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment(changes))
        try:
            assert server.stderr
            port = re.search(r"http://127\.0\.0\.1:(\d+)", line := server.stderr.readline())
            if not port:
                sys.exit(line)
            connection = http.client.HTTPConnection("127.0.0.1", int(port.group(1)), timeout=60)
            answered, began, end = 0, 0.0, float("inf")
            while time.monotonic() < end:
                connection.request("POST", "/predict", self.body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                answer = reply.read().decode()
                if reply.status == 503 and not began:
                    time.sleep(0.1)  # it tests itself first
                    continue
                if reply.status != 200:
                    sys.exit(answer)
                if not began:  # the first answer warms up
                    began = time.monotonic()
                    end = began + self.seconds
                else:
                    answered += 8
            return answered / (time.monotonic() - began)
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement, about")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--what", nargs="+", default=["train-tiny", "train-small", "serve"])
    parser.add_argument("--suite", action="store_true", help="time the test suite on two cores too")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before", flush=True)
        print("| what | alone, torch's choice | alone | two at once, each | share of alone |")
        print("| --- | --- | --- | --- | --- |", flush=True)
        for what in options.what:
            verb, _, preset = what.partition("-")
            work = Train(folder, preset, options.seconds) if verb == "train" else Serve(folder, options.seconds)
            today, alone, pairs = [], [], []
            for repeat in range(options.repeat):  # in turns, and in turns first: machines drift
                for rates, changes in ((today, TORCH), (alone, {}))[:: -1 if repeat % 2 else 1]:
                    rates.append(work.rate("alone", changes))
                pairs += pool.map(work.rate, ("first", "second"), ({}, {}))
            before, one, each = (statistics.median(rates) for rates in (today, alone, pairs))
            share = min(pairs) / one
            print(f"| {what} | {before:,.0f} | {one:,.0f} | {each:,.0f} | {share:.2f} |", flush=True)
            failed |= one < 0.9 * before or share < 0.4
    if options.suite:
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "2"], env=environment({}))
        print(f"the test suite on two cores: {time.monotonic() - began:.0f} s, exit code {done.returncode}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
