"""Damage the files of run directories in every way, and open each with the commands that read it.

    python benchmarks/fuzz_runs.py [--cases 2000] [--seed 0]

A run with its dense twin, a delta on a base, an export and a saved estimator are made first. Each case damages one file
of one of them (checkpoints apart, which only `train --resume` reads) and runs predict, eval, explain or the service's
loading on it in this process. In every other case the recorded hash is made to fit the damaged file, as in a directory
that a stranger made. A case is fine if it ends in an error of ours, exit code 2, 3 or 4, or with the answer of the
undamaged directory. Exits with 1 if a case ends in a traceback or takes more than ten seconds, or if the answer is
another though neither a record for people to read nor a hash in it was changed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils import logging

from budgetformer.cli import main as command_line

SECONDS = 10
UNVERIFIED = ("run.json", "export.json", "evaluation.json", "history.jsonl", "calibration.json")  # no hash is recorded
ADDRESS_SPACE = 8 * 2**30
TEXT = "a superb story of town"
TOO_MUCH = (10**7, 10**9, 10**30, -1, 0, 1.5, 1e308, float("nan"))
FOREIGN = (
    {"name": "left-pad", "version": "1.3.0", "dependencies": {}},
    {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "vocab_size": 50257},
    {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99},
    {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}},
    {"format_version": 1, "status": "done"},
    [{"a": 1}], "text", 5, True,
)  # fmt: skip


def damaged(content: bytes, rng: random.Random, name: str) -> tuple[str, bytes | None]:
    """A kind of damage and what it makes of a file; None: the file is gone."""
    kinds: dict[str, Callable[[], bytes | None]] = {
        "truncated": lambda: content[: rng.randrange(len(content) or 1)],
        "emptied": lambda: b"",
        "flipped": lambda: flip(content, rng),
        "replaced": lambda: rng.choice([b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, rng.randbytes(500)]),
        "foreign": lambda: json.dumps(rng.choice(FOREIGN)).encode(),
        "removed": lambda: None,
    }
    if name.endswith((".json", ".jsonl")):  # the likeliest damage of what people edit
        kinds |= {f"edited {number}": lambda: edit(content, rng) for number in range(4)}
    kind = rng.choice(list(kinds))
    return kind.split()[0], kinds[kind]()


def flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(min(len(content), rng.choice([1, 1, 2, 8, 64]))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def edit(content: bytes, rng: random.Random) -> bytes:
    """Another value, often of another type or size, or none, at a random place of a JSON document."""
    lines = content.decode().splitlines() if b"}\n{" in content else [content.decode()]
    number = rng.randrange(len(lines))
    document = json.loads(lines[number])
    places = list(branches(document))
    if not places:
        return b"{}"
    holder, key = rng.choice(places)
    if rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = rng.choice([*TOO_MUCH, *FOREIGN, None, "", [], {}, "fixed:0.5", "../x", "9" * 5000])
    lines[number] = json.dumps(document)
    return "\n".join(lines).encode()


def branches(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a document: what holds it, and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:200]:
        yield value, key
        yield from branches(inner)


def command(*words: object) -> str:
    """A command line in this process: "exit 0: OUTPUT", or "exit N"."""
    argv, sys.argv = sys.argv, ["budgetformer", *map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            command_line()
    except SystemExit as stop:
        return f"exit {stop.code}" if stop.code else f"exit 0: {out.getvalue()}"
    finally:
        sys.argv = argv
    return f"exit 0: {out.getvalue()}"


def service(folder: Path) -> str:
    """What `serve` does before it listens."""
    from budgetformer.errors import BudgetFormerError
    from budgetformer.serving.service import Engine
    from budgetformer.serving.settings import Settings

    try:
        Engine(Settings(run=folder)).self_test()
        return "exit 0: ready"
    except BudgetFormerError as error:
        return f"exit {error.exit_code}"


def estimator(folder: Path) -> str:
    from budgetformer import BudgetFormerClassifier, BudgetFormerError

    try:
        return f"exit 0: {BudgetFormerClassifier.load(folder).predict_proba([TEXT]).tolist()}"
    except BudgetFormerError as error:
        return f"exit {error.exit_code}"


def report(folder: Path) -> str:
    """What `train --resume` does with a run that is finished."""
    from budgetformer import BudgetFormerError
    from budgetformer.report import write_card, write_report

    try:
        return f"exit 0: {write_card(folder).read_text()} {write_report(folder).read_text()}"
    except BudgetFormerError as error:
        return f"exit {error.exit_code}"


def uses(rows: Path) -> dict[str, tuple[Callable[[Path], str], ...]]:
    """What reads each kind of directory."""

    def predict(folder: Path) -> str:
        return command("predict", folder, "--text", TEXT, "--json")

    def evaluate(folder: Path) -> str:
        return command("eval", folder, rows, "--limit", "8", "--json")

    def explain(folder: Path) -> str:
        return command("explain", folder, "--text", TEXT, "--json")

    every = (predict, evaluate, explain, service, report)
    return {"run": every, "delta": every, "export": (predict, evaluate), "estimator": (estimator, predict, evaluate)}


class Hang(BaseException):
    """It took too long."""


def outcome(use: Callable[[Path], str], folder: Path) -> tuple[str, str]:
    """How it ended, and the answer or what went wrong."""

    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        ended, _, answer = use(folder).partition(": ")
        return ended, answer
    except Hang:
        return "hang", traceback.format_exc()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "traceback", traceback.format_exc()
    finally:
        signal.alarm(0)


def files_of(folder: Path) -> list[Path]:
    """All that is not a checkpoint, nor a page for people."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in (".md", ".html"))
    return [path for path in files if "checkpoints" not in path.parts]


def accept(file: Path, cleanup: contextlib.ExitStack) -> bool:
    """Make the recorded hash fit the file; False where none is recorded."""
    record = next((path for name in ("run.json", "export.json") if (path := file.with_name(name)).exists()), file)
    content = record.read_bytes()
    if record == file or file.name not in (about := json.loads(content)).get("sha256", {}):
        return False
    cleanup.callback(record.write_bytes, content)
    about["sha256"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    record.write_text(json.dumps(about))
    return True


def fuzz(folders: dict[str, Path], rows: Path, cases: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Counts by outcome, and a report of each case that is not fine."""
    rng, counts, wrong = random.Random(seed), Counter[str](), []
    readers = {kind: use for kind, use in uses(rows).items() if kind in folders}
    expected = {(kind, use): outcome(use, folders[kind]) for kind, some in readers.items() for use in some}
    for (kind, use), (ended, answer) in expected.items():
        assert ended == "exit 0", (kind, use.__name__, answer)
    for case in range(cases):
        kind = rng.choice(list(readers))
        file, use = rng.choice(files_of(folders[kind])), rng.choice(readers[kind])
        content = file.read_bytes()
        damage, changed = damaged(content, rng, file.name)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(file.write_bytes, content)
            file.unlink() if changed is None else file.write_bytes(changed)
            strangers = case % 2 == 1 and changed is not None and accept(file, cleanup)
            began = time.monotonic()
            ended, answer = outcome(use, folders[kind])
            if ended == "exit 0" and answer != expected[kind, use][1]:
                strangers = strangers or file.name in UNVERIFIED
                ended = "exit 0, the answer of what was changed" if strangers else "other answer"
        counts[ended] += 1
        if not ended.startswith("exit") or ended in ("exit 1", "exit 5"):
            place = file.relative_to(folders[kind])
            wrong.append(f"case {case}: {kind}/{place} {damage}, {use.__name__}: {ended} after "
                         f"{time.monotonic() - began:.1f} s\n{changed!r:.300}\n{answer}")  # fmt: skip
    return counts, wrong


def write_rows(folder: Path) -> Path:
    """Texts with a word that decides the label."""
    good, bad, other = "superb lovely fine", "dull poor flat", "story film of town people with music and light"
    rng, rows = random.Random(0), folder / "rows.csv"
    texts = (" ".join([rng.choice((good, bad)[n % 2].split()), *rng.choices(other.split(), k=8)]) for n in range(120))
    lines = [f"{text},{('good', 'bad')[n % 2]}" for n, text in enumerate(texts)]
    rows.write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    return rows


def make(folder: Path) -> tuple[dict[str, Path], Path]:
    """A directory of each kind, and rows with labels."""
    from transformers import BertConfig, BertForSequenceClassification

    from budgetformer import BudgetFormerClassifier
    from budgetformer.data.tokenizer import train_tokenizer

    rows = write_rows(folder)
    texts, labels = zip(*(line.split(",") for line in rows.read_text().splitlines()[1:]), strict=True)
    tokenizer = train_tokenizer(texts, vocab_size=200)
    tokenizer.save_pretrained(folder / "base")
    bert = BertConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                      intermediate_size=48, max_position_embeddings=64)  # fmt: skip
    BertForSequenceClassification(bert).save_pretrained(folder / "base")
    tiny = ("--preset", "tiny", "--epochs", "1", "--max-length", "32", "--set", "vocab_size=200")
    based = ("--base", folder / "base", "--epochs", "1", "--max-length", "32", "--set", "dense_epochs=1")
    folders = {kind: folder / kind for kind in ("run", "delta", "export", "estimator")}
    for words in (
        ("train", rows, "-o", folders["run"], *tiny, "--with-baseline"),
        ("calibrate", folders["run"], rows, "--max-cost", "0.9"),
        ("train", rows, "-o", folders["delta"], *based, "--set", "delta=true"),
        ("export", folders["run"], "-o", folders["export"]),
    ):
        ended = command(*words)
        assert ended.startswith("exit 0"), (words, ended)
    BudgetFormerClassifier("tiny", epochs=1, vocab_size=200).fit(texts, labels).save(folders["estimator"])
    return folders, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))  # an absurd size must not take the machine
    with tempfile.TemporaryDirectory() as name:
        folders, rows = make(Path(name))
        began = time.monotonic()
        counts, wrong = fuzz(folders, rows, options.cases, options.seed)
    for report in wrong:
        print(report)
    print(f"{options.cases} cases in {time.monotonic() - began:.0f} s: "
          + ", ".join(f"{count} {ended}" for ended, count in sorted(counts.items())))  # fmt: skip
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
