"""From a run whose heads are ranked to a directory with a static torch model that has the best of them alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from budgetformer.errors import UsageError
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.files import hash_files, write_directory, write_json


def export_frozen(
    model: BudgetFormerForSequenceClassification,
    tokenizer: Mapping[str, bytes],
    record: Mapping[str, Any],
    target: Path,
    *,
    run: Path,
    budget: float,
) -> dict[str, Any]:
    """Write `target`, whole or not at all: a run with `budget` of all units, or at 1 an ordinary model of the base.

    `tokenizer` is its files by name, `record` the run.json. The result names the heads and groups by
    layer, or the base's architecture.
    """
    if target.exists():
        raise UsageError(f"{target} exists already: give another directory with -o")
    frozen = model.freeze(budget)
    ours = isinstance(frozen, BudgetFormerForSequenceClassification)

    def fill(folder: Path) -> None:
        frozen.save_pretrained(folder)
        for name, content in tokenizer.items():
            (folder / name).write_bytes(content)
        if ours:
            about = {"frozen": {"run": str(run), "budget": budget}, "sha256": hash_files(folder)}
            write_json(folder / "run.json", {**record, **about})

    write_directory(target, fill, "Give another directory with -o")
    result = {"format": "torch", "budget": budget, "heads": model.config.num_attention_heads}
    result |= {"layers": model.config.num_hidden_layers, "architecture": frozen.config.model_type}
    for name in ("heads", "groups"):
        lists = frozen.config.gates[name] if ours else None
        result[f"{name}_by_layer"] = None if lists is None else [len(units) for units in lists]
    return {**result, "groups": model.config.groups}
