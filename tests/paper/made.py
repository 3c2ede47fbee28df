"""Data in the shape of the paper's five data sets: few rows whose words give the label away."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from budgetformer_reproduction.cells import Plan
from budgetformer_reproduction.reproduce import make_plan
from budgetformer_reproduction.scale import DATASETS, FULL_ROWS

WORDS = "river stone cloud green house walk light paper north seven".split()


def smoke_plan(folder: Path, data: str, datasets: str | None = None) -> Plan:
    """The smoke scale on data of our own."""
    return replace(make_plan("smoke", folder, 1, datasets), data_dir=data)


def make_data(folder: Path, rows: int = 240, test: int = 60) -> Path:
    """Write the five folders; SNLI has pairs, a validation file and annotators."""
    rng = random.Random(0)
    for name in DATASETS:
        classes = FULL_ROWS[name][2]
        labels = ["entailment", "neutral", "contradiction"] if name == "snli" else [f"class{i}" for i in range(classes)]
        (folder / name).mkdir(parents=True)
        (folder / name / "labels.json").write_text(json.dumps(labels))
        sizes = {"train": rows, "test": test, **({"validation": test} if name == "snli" else {})}
        for split, size in sizes.items():
            lines = [_row(rng, number % classes, name == "snli") for number in range(size)]
            (folder / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    votes = [{"annotator_labels": [1, 1, 1, *rng.choices([1, 2], k=2)]} for _ in range(test)]
    (folder / "snli" / "test_annotators.jsonl").write_text("\n".join(map(json.dumps, votes)) + "\n")
    return folder


def _row(rng: random.Random, label: int, pair: bool) -> dict[str, object]:
    words = [*rng.choices(WORDS, k=rng.randint(2, 8)), f"sign{label}", str(rng.randrange(10**6))]
    row: dict[str, object] = {"text": " ".join(words), "label": label}
    return {**row, "text_pair": f"{rng.choice(WORDS)} sign{label}"} if pair else row
