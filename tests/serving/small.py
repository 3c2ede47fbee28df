"""An untrained model with gates that differ from text to text, and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from budgetformer import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.data.tokenizer import train_tokenizer
from budgetformer.runs.record import FORMAT_VERSION

TEXTS = [
    "the small train was late but the view over the lake was lovely",
    "a long and clumsy film with one fine scene at the end of it",
    "shares in the shipping company rose after the quarter",
]


def small(**options: Any) -> tuple[BudgetFormerForSequenceClassification, Tokenizer]:
    """A tiny model of two layers with four heads."""
    torch.manual_seed(3)
    tokenizer = train_tokenizer(TEXTS, vocab_size=120)
    labels = {0: "travel", 1: "film", 2: "money"}
    config = BudgetFormerConfig.preset(
        "tiny", **{"vocab_size": 120, "id2label": labels, "initializer_range": 0.3, **options}
    )
    return BudgetFormerForSequenceClassification(config).eval(), tokenizer.backend_tokenizer


def write_run(folder: Path, *, pairs: bool = False, max_length: int = 24, **options: Any) -> Path:
    """The model as the directory of a finished run."""
    model, _ = small(segment_embeddings=pairs, **options)
    model.save_pretrained(folder)
    train_tokenizer(TEXTS, vocab_size=120).save_pretrained(folder)
    record = {
        "format_version": FORMAT_VERSION, "name": folder.name, "status": "done", "max_length": max_length,
        "pairs": pairs, "task": model.config.task,
        "labels": [] if model.config.task == "regression" else model.config.label_names,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder
