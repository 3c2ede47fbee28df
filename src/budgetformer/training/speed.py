"""A run against its dense twin by the clock, from text to label."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from budgetformer.cost.energy import measure
from budgetformer.cost.timing import take_turns
from budgetformer.engine.scores import score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import ModelError
from budgetformer.evaluate import cost_of
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.provenance import environment
from budgetformer.runs.run import Run

_BATCHES = (1, 8, 32)


def bench_run(
    folder: Path, *, texts: int = 2000, country: str | None = None, intensity: float | None = None
) -> dict[str, Any]:
    """Time a run and its dense twin on texts of the run's own final split, from text to label, in turns."""
    run = Run.open(folder)
    if run.baseline is None:
        raise ModelError(f"{folder} has no dense twin to compare with: train it with --with-baseline")
    model, twin, tokenizer, length = run.model, run.baseline.model, run.tokenizer, run.max_length
    held_out = run.held_out().sample(texts)
    split = held_out.split
    pairs = [(e.text, e.text_pair) for e in held_out.data.splits[split].examples()]

    def labels(which: BudgetFormerForSequenceClassification, batch: int) -> Callable[[], list[int]]:
        return lambda: _classify(which, tokenizer, pairs, batch, length)

    rows = []
    with torch.inference_mode():
        for batch in _BATCHES:
            ms = take_turns(
                {"dense": labels(twin, batch), "selective": labels(model, batch)}, seconds=20, least=3, most=9
            )
            rows.append({
                "batch": batch, "dense_ms": ms["dense"], "selective_ms": ms["selective"],
                "speedup": ms["dense"] / ms["selective"], "texts_per_second": 1000 * len(pairs) / ms["selective"],
            })  # fmt: skip
    outcome = score(TorchEngine(model), run.encode(held_out))
    cost = cost_of(outcome, model.config)
    result: dict[str, Any] = {
        "run": str(folder), "split": split, "texts": len(pairs), "mean_tokens": cost["mean_tokens"],
        "k_over_h": float((outcome.heads / model.config.num_attention_heads).mean()),
        "ideal": 1 / cost["flops_ratio"], "ceiling": 1 / (1 - cost["attention_share_of_dense"]),
        "rows": rows, "energy": None,
        "environment": environment(),
    }  # fmt: skip
    if country is not None or intensity is not None:
        result["energy"] = {
            name: _energy(labels(which, 32), len(pairs), country, intensity)
            for name, which in (("selective", model), ("dense", twin))
        }
    return result


def _energy(work: Callable[[], object], texts: int, country: str | None, intensity: float | None) -> dict[str, Any]:
    with torch.inference_mode():
        energy = measure(work, texts, country=country, intensity=intensity)
    return {
        **energy.per_thousand,
        "seconds": energy.seconds,
        "source": energy.source,
        "intensity": energy.intensity_from,
    }


def _classify(
    model: BudgetFormerForSequenceClassification,
    tokenizer: Any,
    pairs: list[tuple[str, str | None]],
    batch: int,
    length: int,
) -> list[int]:
    """Text to label for all texts, as a service would: tokenise, sort by length, batch, pad, classify."""
    labels = [0] * len(pairs)
    window = 64 * batch
    for start in range(0, len(pairs), window):
        some = pairs[start : start + window]
        seconds = [b for _, b in some] if some[0][1] is not None else None
        ids = tokenizer([a for a, _ in some], seconds, truncation=True, max_length=length)
        order = sorted(range(len(some)), key=lambda i: len(ids["input_ids"][i]))
        for at in range(0, len(order), batch):
            chosen = order[at : at + batch]
            wanted = {key: [ids[key][i] for i in chosen] for key in ids}
            padded = tokenizer.pad(wanted, return_tensors="pt")
            found = (
                model(**padded).logits.argmax(-1).tolist() if model.config.task != "regression" else [0] * len(chosen)
            )
            for i, label in zip(chosen, found, strict=True):
                labels[start + i] = label
    return labels
