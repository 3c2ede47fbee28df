"""A finished run, opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetformer.data import load_tokenizer
from budgetformer.errors import ModelError
from budgetformer.models import load_model
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT_VERSION = 1  # of run.json
TRAINING_ROWS = "training_rows.safetensors"  # the text hashes (uint64) of the rows that a run was trained on


def load_run(folder: Path) -> tuple[BudgetFormerForSequenceClassification, PreTrainedTokenizerFast, dict[str, Any]]:
    """The model, tokenizer and record of a finished run."""
    if not folder.is_dir():
        raise ModelError(f"{folder} does not exist: give the directory of a run")
    record = read_json(folder / "run.json", "give the directory of a run")
    if not (folder / "config.json").exists():
        raise ModelError(f"{folder} is not finished (status: {record.get('status')}): continue it with --resume")
    model = load_model(folder)
    model.train(False)
    return model, load_tokenizer(folder, offline=True), record
