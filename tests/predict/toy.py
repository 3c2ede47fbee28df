"""Small scorers that need no training: random weights, a tokenizer of a few words."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from budgetformer import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.data.tokenizer import train_tokenizer
from budgetformer.engine.scorer import Scorer
from budgetformer.engine.torch import TorchEngine
from budgetformer.runs.record import FORMAT_VERSION
from tests.gates import sorted_options

WORDS = "the film was a story of some people in town with music and light great awful".split()


@cache
def tokenizer() -> Any:
    return train_tokenizer([" ".join(WORDS)] * 3, vocab_size=200)


EXITS = {"layers": [1], "words": False, "rule": [[0.0, -1.0]], "limit": 0.4}


def make_model(**options: Any) -> BudgetFormerForSequenceClassification:
    torch.manual_seed(0)
    made = {"vocab_size": len(tokenizer()), "id2label": {0: "neg", 1: "pos", 2: "none"}, "training_progress": 1.0}
    config = BudgetFormerConfig.preset(
        "tiny", **sorted_options(**{**made, "budget_as": "count", "tau_min": 1.0, "initializer_range": 0.2, **options})
    )
    return BudgetFormerForSequenceClassification(config)


def make_scorer(max_length: int = 16, *, config: dict[str, Any] | None = None, **options: Any) -> Scorer:
    return Scorer(
        TorchEngine(make_model(**(config or {})).eval()), tokenizer().backend_tokenizer, max_length, **options
    )


def make_run(folder: Path, texts: Sequence[str] = ("text",), *, max_length: int = 16, **options: Any) -> Path:
    """The directory of a finished run as far as predicting needs it."""
    model = make_model(segment_embeddings=len(texts) > 1, **options)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    data = {"data": "d.csv", "text": None, "text_pair": None}
    record = {
        "format_version": FORMAT_VERSION, "name": folder.name, "status": "done", "max_length": max_length, "data": data,
        "text_columns": list(texts), "pairs": len(texts) == 2, "task": model.config.task,
        "labels": [] if model.config.task == "regression" else model.config.label_names,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def make_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with a number, a text (some too long for the run) and something that needs quoting."""
    rng = random.Random(seed)
    return [
        {"id": number, "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 20))), "note": f'a "{number}", b\nc\rd'}
        for number in range(count)
    ]
