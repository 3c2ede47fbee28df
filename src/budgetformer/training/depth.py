"""What a model's stages need beside gradients: words fitted before training, the exit rule fitted after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save

from budgetformer.calibrate import exit_curve
from budgetformer.data import TokenTable
from budgetformer.engine.scores import score
from budgetformer.engine.torch import TorchEngine
from budgetformer.exits import DISAGREEMENT, fit_rule
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.files import named_read_errors, write_bytes
from budgetformer.words import Words, fit_words, out_of_fold

_PARTS = ("idf", "weights", "bias")


def fit_words_stage(
    model: BudgetFormerForSequenceClassification, table: TokenTable, file: Path, seed: int
) -> TokenTable:
    """Fit the stage of words to the training rows; the rows come back with what words fitted without them say.

    Both are written to `file`, and read from it where an interrupted run, or another process, has left it.
    """
    stage, config = model.stages.words, model.config
    if stage is None:
        return table
    assert table.labels is not None
    if file.exists():
        with named_read_errors(file, "delete it and resume"):
            saved = load_file(file)
    else:
        task = (table, np.asarray(table.labels), config.labels, config.task)
        bits = config.stages.options.word_bits
        words = fit_words(*task, bits=bits)
        saved = {name: getattr(words, name) for name in _PARTS}
        saved["out_of_fold"] = out_of_fold(*task, bits=bits, seed=seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, save(saved))
    stage.fill(Words(*(saved[name] for name in _PARTS)))
    return replace(table, words_logits=saved["out_of_fold"])


def fit_exit_rule(model: BudgetFormerForSequenceClassification, validation: TokenTable) -> None:
    """Fit P(disagree) of each stage, the curve that budgets are read from, and the limit of `learned`.

    Every other validation row is used: the rest is left for `calibrate`, which needs rows that the rule has not seen.
    """
    exits = model.config.exits
    if not exits or model.config.task == "regression":
        return
    exits.update(rule=(), curve=(), limit=0.0)
    scores = score(TorchEngine(model), validation.select(np.arange(0, len(validation), 2)), "exit:0")
    assert scores.stage_logits is not None
    exits["rule"] = fit_rule(scores.stage_logits, model.config.task)
    curve = exit_curve(scores, model.config.spec)
    exits["curve"] = [(point["cost"], point["limit"]) for point in curve if point["limit"] < np.inf]
    safe = [point["limit"] for point in curve if point["disagreement"] <= DISAGREEMENT]
    exits["limit"] = max(safe, default=0.0)
