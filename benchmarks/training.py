"""Training throughput as ratios in one run: BudgetFormer, its dense twin, and a plain loop over torch's encoder.

    python benchmarks/training.py [--width 128] [--steps 40] [--json]

The three models take turns, step by step, on the same batches, so that noise hits all alike; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from budgetformer import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.nn.encoder import sinusoids
from budgetformer.training.recipe import PRESETS

Step = Callable[[Tensor, Tensor, Tensor], None]


class PlainEncoder(nn.Module):
    """The same shape out of torch's own parts."""

    def __init__(self, config: BudgetFormerConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, D)
        self.register_buffer("positions", sinusoids(config.max_position_embeddings, D))
        layer = nn.TransformerEncoderLayer(
            D, config.num_attention_heads, config.intermediate_size, 0.1, batch_first=True
        )
        layer.self_attn.dropout = config.attention_dropout
        self.encoder = nn.TransformerEncoder(layer, config.num_hidden_layers, enable_nested_tensor=False)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(D, config.labels)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) * self.tokens.embedding_dim**0.5 + self.positions[: ids.shape[1]])
        x = self.encoder(x, src_key_padding_mask=~mask)
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        logits: Tensor = self.classifier(self.dropout(pooled))
        return logits


def stepper(model: nn.Module, plain: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor, mask: Tensor, labels: Tensor) -> None:
        if plain:
            loss = nn.functional.cross_entropy(model(ids, mask), labels)
        else:
            loss = model(ids, mask, labels, progress=0.5).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def ratio(theirs: list[float], ours: list[float]) -> float:
    """Our throughput as a share of theirs: the median over pairs of neighbouring steps."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape: dict[str, Any] = {
        "hidden_size": options.width, "intermediate_size": 4 * options.width, "num_attention_heads": options.heads,
        "num_hidden_layers": options.layers, "vocab_size": 16000, "num_labels": 4, "attention_dropout": 0.0,
        **PRESETS["small"].model,
    }  # fmt: skip
    torch.manual_seed(0)
    config = BudgetFormerConfig(**shape)
    twin = BudgetFormerConfig(**shape, gates={"kind": "all"})
    steps = {
        "budgetformer": stepper(BudgetFormerForSequenceClassification(config).train(), plain=False),
        "dense": stepper(BudgetFormerForSequenceClassification(twin).train(), plain=False),
        "torch": stepper(PlainEncoder(config).train(), plain=True),
    }
    ids = torch.randint(0, 16000, (options.batch, options.length))
    mask = torch.arange(options.length) < torch.randint(options.length // 2, options.length + 1, (options.batch, 1))
    mask[0] = True
    labels = torch.randint(0, 4, (options.batch,))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.steps + 3):
        for name, step in steps.items():
            began = time.perf_counter()
            step(ids, mask, labels)
            if turn >= 3:
                times[name].append(time.perf_counter() - began)
    ms = {name: 1000 * statistics.median(values) for name, values in times.items()}
    result = {
        **vars(options), "threads": torch.get_num_threads(), "ms_per_step": ms,
        "budgetformer_of_dense": ratio(times["dense"], times["budgetformer"]),
        "dense_of_torch": ratio(times["torch"], times["dense"]),
    }  # fmt: skip
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in ms.items():
        print(f"{name:14s} {value:8.1f} ms a step")
    print(f"throughput of BudgetFormer against its dense twin: {result['budgetformer_of_dense']:.3f}")
    print(f"throughput of the dense twin against torch's encoder: {result['dense_of_torch']:.3f}")


if __name__ == "__main__":
    main()
