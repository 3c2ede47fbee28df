"""`budgetformer predict` against a bare loop over the model, and its peak memory at a tenth and at all of the rows.

    python benchmarks/scoring.py [--rows 1000000] [--timed-rows 100000] [--blocks 5] [--preset small] [--json]

The bare loop gets batches that are tokenised and sorted by length beforehand, and keeps nothing but the logits. Both
take turns, block of rows by block, in one process. Peak memory is that of fresh processes, which score all rows; 0
rows leave one of the two out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from budgetformer import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.data.batches import collate, eval_plan
from budgetformer.data.locate import DataSource
from budgetformer.data.tokenizer import train_tokenizer
from budgetformer.predict.job import Predictor, Request
from budgetformer.runs.record import FORMAT_VERSION
from budgetformer.runs.run import Run

WORDS = "the film was a story of some people in town with music and light and a long road home to sea".split()


def write_rows(path: Path, rows: int, seed: int) -> None:
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        file.write("id,text\n")
        for number in range(rows):
            file.write(f"{number},{' '.join(rng.choices(WORDS, k=rng.randint(5, 35)))}\n")


def make_run(folder: Path, preset: str) -> None:
    """A run with random weights: speed does not depend on what it has learned."""
    tokenizer = train_tokenizer([" ".join(WORDS)] * 3, vocab_size=500)
    torch.manual_seed(0)
    config = BudgetFormerConfig.preset(
        preset,
        vocab_size=len(tokenizer),
        id2label={0: "a", 1: "b"},
        training_progress=1.0,
        gates={"budget_as": "count"},
    )
    BudgetFormerForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record = {
        "format_version": FORMAT_VERSION, "name": folder.name, "status": "done", "max_length": 64, "pairs": False,
        "data": {"data": "rows.csv", "text": "text", "text_pair": None}, "text_columns": ["text"],
        "task": config.task, "labels": config.label_names,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))


def bare_loop(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        for batch in batches:
            model(**batch, budget="learned").logits.numpy()
    return time.perf_counter() - began


def speed(folder: Path, rows: int, blocks: int) -> dict[str, Any]:
    predictor = Predictor(Run.open(folder / "run"))
    model = predictor.run.model
    seconds = {"predict": 0.0, "bare loop": 0.0}
    for block in range(blocks + 1):  # the first warms up
        data = folder / "block.csv"
        write_rows(data, rows // blocks if block else 2000, block)
        texts = [line.partition(",")[2] for line in data.read_text().splitlines()[1:]]
        table = predictor.scorer.encode(texts)
        plan = eval_plan(table.lengths, token_budget=predictor.scorer.engine.batch_tokens)
        batches = [collate(table, rows_of_batch, 0).tensors() for rows_of_batch in plan]
        loop = bare_loop(model, batches)
        began = time.perf_counter()
        request = Request(DataSource(str(data)), folder / "out.jsonl", overwrite=True)
        predictor.predict(request, lambda line: None)
        spent = time.perf_counter() - began
        if block:
            seconds["predict"] += spent
            seconds["bare loop"] += (loop + bare_loop(model, batches)) / 2  # before and after: machines drift
    done = rows // blocks * blocks
    rates = {f"{name} rows/s": done / spent for name, spent in seconds.items()}
    return {**rates, "predict / bare loop": seconds["bare loop"] / seconds["predict"]}


def peak(folder: Path, rows: int) -> float:
    """MiB that a fresh process takes at most."""
    write_rows(folder / "rows.csv", rows, 0)
    words = ["predict", str(folder / "run"), str(folder / "rows.csv"), "-o", str(folder / "all.jsonl"), "--overwrite"]
    child = subprocess.Popen([sys.executable, "-m", "budgetformer", *words], stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"predict failed with status {status}")
    return usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--timed-rows", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder / "run", options.preset)
        result = speed(folder, options.timed_rows, options.blocks) if options.timed_rows else {}
        for rows in (options.rows // 10, options.rows) if options.rows else ():
            result[f"peak MiB at {rows} rows"] = peak(folder, rows)
    result |= {"threads": torch.get_num_threads(), "timed rows": options.timed_rows, "preset": options.preset}
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for key, value in result.items():
        print(f"{key}: {value:,.2f}" if isinstance(value, float) else f"{key}: {value}")


if __name__ == "__main__":
    main()
