"""Tiny random encoders of every supported architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from budgetformer.data.tokenizer import train_tokenizer
from tests.training.toy import BAD, GOOD, REST

KINDS = ("bert", "roberta", "distilbert", "electra", "xlm-roberta", "modernbert")
VOCAB, HEADS, LAYERS, WIDTH = 90, 4, 3, 32


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    """A random classifier whose weights are large enough that a wrong one shows."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "num_labels": 3,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 0.0),
    }
    if kind == "distilbert":
        shape |= {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48, "dropout": 0.0,
                  "attention_dropout": 0.0, "seq_classif_dropout": 0.0}  # fmt: skip
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            del shape[name]
    if kind == "modernbert":
        shape |= {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2,
                  "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    if kind == "electra":
        shape["embedding_size"] = 16
    torch.manual_seed(3)
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **(shape | changes))).eval()


def save_base(folder: Path, kind: str = "bert", **changes: Any) -> Path:
    """A tiny encoder on disk with a tokenizer for the toy reviews."""
    words = [*GOOD, *BAD, *REST, *map(str, range(10))]
    tokenizer = train_tokenizer([" ".join(words)], vocab_size=VOCAB + 40)
    tiny(kind, vocab_size=len(tokenizer), initializer_range=0.1, num_labels=2, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ragged(batch: int = 5, length: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of texts of different lengths."""
    mask = torch.arange(length) < torch.randint(2, length, (batch, 1))
    mask[0] = True
    ids = torch.randint(5, VOCAB, (batch, length)).masked_fill(~mask, 0)
    return ids, mask.long()
