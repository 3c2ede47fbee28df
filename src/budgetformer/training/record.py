"""What a run says of itself in run.json, and which directories a run may take."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from budgetformer.errors import ModelError, UsageError
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.files import named_write_errors, read_json, write_json
from budgetformer.runs.provenance import environment
from budgetformer.runs.run import FORMAT_VERSION, TRAINING_ROWS
from budgetformer.training.prepare import Prepared
from budgetformer.training.recipe import Recipe

# What an attempt may leave that fails before training begins. Only beside a run.json of such an attempt is it ours.
_LEFTOVERS = {"run.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", ".staged",
              "..staged.tmp", ".run.json.tmp"}  # fmt: skip
_PREPARING = "preparing"


def begun_record(folder: Path) -> dict[str, Any] | None:
    """run.json of a model whose training began; None before."""
    if not (file := folder / "run.json").exists():
        return None
    record: dict[str, Any] = read_json(file, "delete it and resume")
    return None if record["status"] == _PREPARING else record


def has_begun(folder: Path) -> bool:
    """Whether training began in a run's directory; the dense model of a base comes first, in baseline/."""
    return any(begun_record(place) is not None for place in (folder, folder / "baseline"))


def claim(folder: Path, resume: bool) -> None:
    """Make the directory of a run, or refuse one that holds another run or something else."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give a directory for the run with -o")
    begun = has_begun(folder)
    if begun and not resume:
        raise UsageError(f"{folder} holds a run already: continue it with --resume, or give another directory with -o")
    if begun:
        return
    if folder.is_dir():
        names = {path.name for path in folder.iterdir()}
        if names - (_LEFTOVERS if "run.json" in names else set()):
            raise UsageError(f"{folder} is not empty and holds no run: give another directory with -o")
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder} cannot be made ({error.strerror}): give another directory with -o") from None
    write_json(folder / "run.json", {"format_version": FORMAT_VERSION, "status": _PREPARING})


def identity_of(prepared: Prepared, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What must be the same for a run to go on. Where the data lies does not matter, only what is in it."""
    places = ("data", "validation", "test", "data_dir", "offline", "quarantine")
    source = {k: v for k, v in asdict(prepared.data.source).items() if k not in places}
    if prepared.data.source.validation == "test":
        source["validation"] = "test"
    idle = ("checkpoint_minutes", *(("base", "dense_epochs", "delta", "ranking") if recipe.base is None else ()))
    return {
        "recipe": {k: v for k, v in recipe.to_json().items() if k not in idle},
        "source": source,
        "data": prepared.data.fingerprint,
        "seed": seed,
    }


def record_of(
    prepared: Prepared, recipe: Recipe, model: BudgetFormerForSequenceClassification, folder: Path
) -> dict[str, Any]:
    """run.json as training begins."""
    data, config = prepared.data, model.config
    columns = data.schema.columns
    provenance = environment()
    place = Path(data.source.data)
    return {
        "format_version": FORMAT_VERSION,
        "budgetformer": provenance["budgetformer"],
        "name": folder.resolve().name,
        "status": "running",
        "data": asdict(data.source),
        "data_path": str(place.resolve()) if place.exists() else None,
        "data_fingerprint": data.fingerprint,
        "data_digests": data.digests,
        "task": config.task,
        "labels": data.labels,
        "pairs": data.is_pair,
        "splits": {name: len(split) for name, split in prepared.splits.items()},
        "cut": {name: int(split.truncated.sum()) for name, split in prepared.splits.items()},
        "columns": data.columns_chosen,
        "text_columns": [columns.text, columns.text_pair] if columns.text_pair else [columns.text],
        "warnings": data.warnings,
        "max_length": recipe.max_length,
        "model": {
            "parameters": sum(p.numel() for p in model.parameters()),
            "allocator": config.kind,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "width": config.hidden_size,
        },
        "recipe": recipe.to_json(),
        "environment": provenance,
    }


def write_training_rows(prepared: Prepared, folder: Path) -> None:
    """The hashes of the training texts, so that evaluation can tell which rows of a file were trained on."""
    path = folder / TRAINING_ROWS
    with named_write_errors(path):
        temporary = path.with_name(f".{path.name}.tmp")
        save_file({"hashes": prepared.data.splits["train"].hashes}, temporary)
        temporary.replace(path)
