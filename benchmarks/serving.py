"""What batching, budgets of depth and deadlines are worth, and how the service stands ten times the load it can bear.

    python benchmarks/serving.py [RUN or EXPORT] [--part depth] [--seconds 10] [--rounds 3] [--json FILE]

Starts `budgetformer serve` and puts load on it from another process. `batching`, a closed loop: so many clients, each
waiting for its answer, with batching and without, in turns. `overload`, an open loop: ten times the requests that were
answered, on schedule, whatever the answers. `half_open`: a server that may have 256 files, without and with 400
connections that stop inside a header. `depth`, for a RUN with exits: the same closed loop at the budgets learned and
full, in turns; then, on schedule, half of what was answered at learned, each with a deadline of 5 and of 20 ms: the
share of answers that were there in time, by the client's clock. Texts are RUN's held-out ones, where they can be
had. Without RUN it serves an untrained model of the `small` preset's size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import budgetformer

WORDS = "the a of film story music town light people night river great awful dull lovely and with in was is".split()
OVERLOAD = 10
OVERLOAD_TEXTS = 16  # of a request: so the model is the bottleneck, not the parsing of refused requests
MOST_CONNECTIONS = 800
HALF_OPEN, FEW_FILES = 400, 256
DEADLINES_MS, OF_CAPACITY = (5, 20), 0.5
HALF_HEADER = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1"


def make_run(folder: Path) -> Path:
    """An untrained model with its tokenizer, as the directory of a run."""
    from budgetformer import BudgetFormerConfig, BudgetFormerForSequenceClassification
    from budgetformer.data.tokenizer import train_tokenizer
    from budgetformer.runs.record import FORMAT_VERSION
    from budgetformer.training.recipe import PRESETS

    tokenizer = train_tokenizer([" ".join(WORDS)], vocab_size=300)
    config = BudgetFormerConfig.preset(
        "small", vocab_size=16_000, num_labels=4, training_progress=1.0, **PRESETS["small"].model
    )
    BudgetFormerForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record = {"format_version": FORMAT_VERSION, "name": "bench", "status": "done", "max_length": 128, "pairs": False}
    record |= {"task": config.task, "labels": config.label_names}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@contextmanager
def served(run: Path, *flags: str, files: int | None = None) -> Iterator[tuple[int, int, Path]]:
    """A ready server: its port, its process id and its log; `files` limits those that it may open."""
    words = [sys.executable, "-m", "budgetformer", "serve", str(run), "--port", "0", *flags]
    limited = [] if files is None else ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"]
    with tempfile.NamedTemporaryFile() as stderr:
        log = Path(stderr.name)
        process = subprocess.Popen([*limited, *words], stderr=stderr)
        try:
            while not (line := re.search(r"serving .*:(\d+)", log.read_text())):
                if process.poll() is not None:
                    sys.exit(f"the server did not start: {log.read_text()}")
                time.sleep(0.05)
            asyncio.run(until_ready(int(line[1])))
            yield int(line[1]), process.pid, log
            process.send_signal(signal.SIGTERM)
            if process.wait(60) != 0:
                sys.exit(f"the server ended with {process.returncode}")
        finally:
            process.kill()
            process.wait()


class Connection(asyncio.Protocol):
    """One kept-alive connection: a request at a time, its status as the result."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.received, self.answer = transport, b"", None
        self.open = True

    def ask(self, request: bytes) -> asyncio.Future[int]:
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.answer

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, rest = self.received.partition(b"\r\n\r\n")
        if end and len(rest) >= int(re.search(rb"content-length: (\d+)", head)[1]):  # type: ignore[index]
            self.received, self.body = b"", rest
            if self.answer and not self.answer.done():
                self.answer.set_result(int(head[9:12]))

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False  # an idle one may be closed at any time: it must not be asked any more
        if self.answer and not self.answer.done():
            self.answer.set_result(0)


async def connect(port: int) -> Connection:
    return (await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port))[1]


async def until_ready(port: int) -> None:
    connection = await connect(port)
    while await connection.ask(b"GET /ready HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") != 200:
        await asyncio.sleep(0.05)


def requests(texts: int, file: str | None = None, **fields: Any) -> list[bytes]:
    """Requests with texts of a file, a JSON string a line, or made-up ones of 3 to 40 words; `fields` go into each."""
    rng, made = random.Random(0), []
    real = [] if file is None else [json.loads(line) for line in Path(file).read_text().splitlines()]
    for _ in range(500):
        some = [rng.choice(real) if real else " ".join(rng.choices(WORDS, k=rng.randint(3, 40))) for _ in range(texts)]
        body = json.dumps({**({"text": some[0]} if texts == 1 else {"texts": some}), **fields}).encode()
        head = (
            b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        made.append(head % len(body) + body)
    return made


async def closed_loop(port: int, clients: int, seconds: float, texts: int, fields: Any = None) -> dict[str, Any]:
    """`clients` connections, each sending as soon as it was answered."""
    made, codes, took = requests(texts, **(fields or {})), Counter[int](), list[float]()
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        connection, place = await connect(port), number * 37
        while (began := time.perf_counter()) < end:
            place += 1
            codes[await connection.ask(made[place % len(made)])] += 1
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    return {"per_second": len(took) / (time.perf_counter() - began), "codes": codes, **quantiles(took)}


async def open_loop(port: int, rate: float, seconds: float, texts: int, fields: Any = None) -> dict[str, Any]:
    """Requests on schedule, each on a connection that is free, or on a new one; `exits` counts where texts left."""
    made, codes, took = requests(texts, **(fields or {})), Counter[int](), list[float]()
    exits = Counter[str]()
    free: list[Connection] = []
    tasks: set[asyncio.Task[None]] = set()
    unsent = 0

    async def one(request: bytes) -> None:
        free[:] = [connection for connection in free if connection.open]
        connection = free.pop() if free else await connect(port)
        began = time.perf_counter()
        code = await connection.ask(request)
        codes[code] += 1
        if code == 200:
            took.append(time.perf_counter() - began)
            exits.update(re.findall(r'"exit":"(.*?)"', connection.body.decode()))
            exits["deadline"] += connection.body.count(b'"deadline":true')
        if code:
            free.append(connection)

    began = time.perf_counter()
    due = sent = 0
    while (now := time.perf_counter() - began) < seconds:
        due = int(now * rate)
        while sent < due:
            sent += 1
            if len(tasks) >= MOST_CONNECTIONS:
                unsent += 1
                continue
            task = asyncio.create_task(one(made[sent % len(made)]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    lasted = time.perf_counter() - began
    offered = (sent - unsent) / seconds
    result = {"offered_per_second": offered, "unsent": unsent, "seconds": lasted, "codes": codes, **quantiles(took)}
    return {**result, "exits": exits, "took_ms": [1000 * seconds for seconds in took]}


def quantiles(took: list[float]) -> dict[str, Any]:
    if len(took) < 2:
        return {"p50_ms": None, "p99_ms": None}
    cuts = statistics.quantiles(took, n=100)
    return {"p50_ms": 1000 * cuts[49], "p99_ms": 1000 * cuts[98]}


def load(loop: str, *arguments: Any) -> dict[str, Any]:
    """Run a loop in a process of its own, so that it does not share the bench's."""
    words = [sys.executable, __file__, "--loop", json.dumps([loop, *arguments])]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=600)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def resident(pid: int) -> float:
    """The memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def batching(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The same closed loop with and without batches, in turns."""
    measured: dict[str, list[dict[str, Any]]] = {"batching": [], "single": []}
    single = (*options.flags, "--set", "batch_tokens=1")
    with served(run, *options.flags) as (together, *_), served(run, *single) as (alone, *_):
        for port in (together, alone):
            load("closed_loop", port, options.clients, 2, 1)  # warm up
        for _ in range(options.rounds):
            for name, port in (("batching", together), ("single", alone)):
                measured[name].append(load("closed_loop", port, options.clients, options.seconds, 1))
    result: dict[str, Any] = {"clients": options.clients}
    for name, rounds in measured.items():
        result[name] = {key: statistics.median(r[key] for r in rounds) for key in ("per_second", "p50_ms", "p99_ms")}
        result[name]["codes"] = sum((Counter(r["codes"]) for r in rounds), Counter())
    result["throughput_ratio"] = result["batching"]["per_second"] / result["single"]["per_second"]
    result["p99_ratio"] = result["batching"]["p99_ms"] / result["single"]["p99_ms"]
    return result


def overload(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Ten times what the service can do; then what it does at once afterwards."""
    with served(run, *options.flags) as (port, pid, _):
        before = load("closed_loop", port, 8, options.seconds, OVERLOAD_TEXTS)
        memory = [resident(pid)]
        rounds = []
        for _ in range(options.rounds):
            rounds.append(load("open_loop", port, OVERLOAD * before["per_second"], options.seconds, OVERLOAD_TEXTS))
            memory.append(resident(pid))
        after = load("closed_loop", port, 8, options.seconds, OVERLOAD_TEXTS)
    codes = sum((Counter(r["codes"]) for r in rounds), Counter[str]())
    return {
        "texts_per_request": OVERLOAD_TEXTS, "capacity_per_second": before["per_second"],
        "offered_per_second": [r["offered_per_second"] for r in rounds], "unsent": sum(r["unsent"] for r in rounds),
        "codes": codes, "only_200_and_503": set(codes) <= {"200", "503"},
        "accepted_per_second": codes["200"] / sum(r["seconds"] for r in rounds),
        "p50_ms": statistics.median(r["p50_ms"] for r in rounds), "p99_ms": max(r["p99_ms"] for r in rounds),
        "resident_mib": memory, "recovered": after["per_second"] / before["per_second"], "codes_after": after["codes"],
    }  # fmt: skip


def half_open(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The same closed loop without and with many connections whose headers never end, in turns."""
    rounds: dict[str, list[dict[str, Any]]] = {"usual": [], "half_open": []}
    with served(run, *options.flags, files=FEW_FILES) as (port, _, log):
        load("closed_loop", port, 8, 2, 1)  # warm up
        for _ in range(options.rounds):
            rounds["usual"].append(load("closed_loop", port, 8, options.seconds, 1))
            with ExitStack() as stack:
                for _ in range(HALF_OPEN):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(HALF_HEADER)
                rounds["half_open"].append(load("closed_loop", port, 8, options.seconds, 1))
        log_bytes = log.stat().st_size
    result: dict[str, Any] = {"connections": HALF_OPEN, "files": FEW_FILES, "log_bytes": log_bytes}
    for name, each in rounds.items():
        result[name] = {key: statistics.median(r[key] for r in each) for key in ("per_second", "p50_ms", "p99_ms")}
        result[name]["codes"] = sum((Counter(r["codes"]) for r in each), Counter())
    return result


def held_out_texts(run: Path, file: Path) -> dict[str, str]:
    """Write the held-out texts of a run to a file; nothing where they cannot be had, or are pairs."""
    from budgetformer.errors import DataError

    opened = budgetformer.load(run)
    try:
        examples = list(opened.held_out().rows.examples())
    except DataError as error:
        print(f"made-up texts: {error}", file=sys.stderr)
        return {}
    if opened.pairs:
        sys.exit(f"{run} reads pairs of texts: give a run for single texts")
    file.write_text("\n".join(json.dumps(example.text) for example in examples))
    return {"file": str(file)}


def depth(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Early exits against the whole model, and deadlines at half of what the service can do."""
    rounds: dict[str, list[dict[str, Any]]] = {"learned": [], "full": []}
    with tempfile.TemporaryDirectory() as folder, served(run, *options.flags) as (port, *_):
        texts = held_out_texts(run, Path(folder) / "texts")
        for number in range(options.rounds + 1):
            for budget, each in rounds.items():
                fields = {"budget": budget, **texts}
                once = load("closed_loop", port, options.clients, options.seconds if number else 2, 1, fields)
                each += [once] * bool(number)  # the first warms up
        result: dict[str, Any] = {}
        for budget, each in rounds.items():
            result[budget] = {
                key: statistics.median(r[key] for r in each) for key in ("per_second", "p50_ms", "p99_ms")
            }
            result[budget]["codes"] = sum((Counter(r["codes"]) for r in each), Counter())
        result["throughput_ratio"] = result["learned"]["per_second"] / result["full"]["per_second"]
        rate = OF_CAPACITY * result["learned"]["per_second"]
        for milliseconds in DEADLINES_MS:
            fields = {"deadline_ms": milliseconds, **texts}
            each = [load("open_loop", port, rate, options.seconds, 1, fields) for _ in range(options.rounds)]
            took = [ms for r in each for ms in r.pop("took_ms")]
            sent = sum(sum(r["codes"].values()) + r["unsent"] for r in each)
            exits = sum((Counter(r["exits"]) for r in each), Counter[str]())
            cut = exits.pop("deadline", 0)
            result[f"deadline_{milliseconds}_ms"] = {
                "requests": sent, "per_second": rate, "in_time": sum(ms <= milliseconds for ms in took) / sent,
                "cut": cut / sent, "exits": {stage: count / sent for stage, count in exits.items()},
                "codes": sum((Counter(r["codes"]) for r in each), Counter()),
                **quantiles([ms / 1000 for ms in took]),
            }  # fmt: skip
    return result


def print_depth(result: dict[str, Any]) -> None:
    print(f"{'':17} {'requests/s':>10} {'p50 ms':>7} {'p99 ms':>7}  in time  cut by the deadline, exits")
    for name in ("full", "learned", *(f"deadline_{ms}_ms" for ms in DEADLINES_MS)):
        row = result[name]
        line = f"{name:17} {row['per_second']:10.0f} {row['p50_ms']:7.1f} {row['p99_ms']:7.1f}"
        if "in_time" in row:
            left = ", ".join(f"{stage} {share:.1%}" for stage, share in sorted(row["exits"].items()))
            line += f"  {row['in_time']:7.2%}  {row['cut']:.1%}; {left}"
        print(f"{line}  {dict(row['codes'])}")
    print(f"learned: {result['throughput_ratio']:.2f}x the requests/s of full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=10, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--flags", type=str.split, default=[], help="further flags for the server, in one word")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this (default: all that the run has)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        name, port, *rest = json.loads(options.loop)
        print(json.dumps(asyncio.run({"closed_loop": closed_loop, "open_loop": open_loop}[name](port, *rest))))
        return
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or make_run(Path(folder))
        staged = budgetformer.load(run).config.exits is not None
        names = options.part or [name for name in PARTS if name != "depth" or staged]
        if "depth" in names and not staged:
            sys.exit(f"--part depth: {run} has no exits: give a run that was trained with them")
        result = {}
        for name in names:
            part, show = PARTS[name]
            result[name] = part(run, options)
            show(result[name])
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def print_batching(both: dict[str, Any]) -> None:
    for name in ("batching", "single"):
        print(f"{name:9} {both[name]['per_second']:7.0f} requests/s  p50 {both[name]['p50_ms']:6.1f} ms  "
              f"p99 {both[name]['p99_ms']:6.1f} ms  {dict(both[name]['codes'])}")  # fmt: skip
    print(f"batching: {both['throughput_ratio']:.2f}x the throughput at {both['p99_ratio']:.2f}x the p99")


def print_overload(over: dict[str, Any]) -> None:
    print(f"overload: {over['capacity_per_second']:.0f} requests/s can be answered, {over['offered_per_second']} came: "
          f"{dict(over['codes'])}, p99 of the accepted {over['p99_ms']:.0f} ms, memory {over['resident_mib']} MiB, "
          f"then {over['recovered']:.2f} of the capacity before, {dict(over['codes_after'])}")  # fmt: skip


def print_half_open(half: dict[str, Any]) -> None:
    for name in ("usual", "half_open"):
        print(f"{name:9} {half[name]['per_second']:7.0f} requests/s  p50 {half[name]['p50_ms']:6.1f} ms  "
              f"p99 {half[name]['p99_ms']:6.1f} ms  {dict(half[name]['codes'])}")  # fmt: skip
    print(f"{half['connections']} half-open connections, {half['files']} files: {half['log_bytes']} bytes of log")


PARTS = {
    "batching": (batching, print_batching),
    "overload": (overload, print_overload),
    "half_open": (half_open, print_half_open),
    "depth": (depth, print_depth),
}


if __name__ == "__main__":
    main()
