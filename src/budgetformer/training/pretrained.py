"""From a pretrained encoder to the two models of a run: the dense one, fine-tuned, and the budgeted one, from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from budgetformer.data.batches import collate, eval_plan
from budgetformer.data.splits import sample_rows
from budgetformer.data.tokens import TokenTable
from budgetformer.engine.answers import predicted
from budgetformer.engine.scores import Floats, Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import ModelError, UsageError
from budgetformer.models.bases import base_hash, load_base
from budgetformer.models.importance import rank_heads
from budgetformer.models.model import BudgetFormerConfig, BudgetFormerForSequenceClassification, retrofit
from budgetformer.training.prepare import Prepared, label_options
from budgetformer.training.recipe import Recipe

_BATCH_TOKENS = 4096  # padded tokens of a batch that heads are ranked on
# Logits of every training row, or the model itself for its layers.
Teacher = Floats | BudgetFormerForSequenceClassification | None


class Built(NamedTuple):
    """A model before it is trained, what it learns from beside labels, and its rows; None: the training rows."""

    model: BudgetFormerForSequenceClassification
    teacher: Teacher = None
    rows: TokenTable | None = None


def dense_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the dense model: all heads, its own number of epochs, the best of them."""
    model = {key: value for key, value in recipe.without_gates().model.items() if key != "distill_layers"}
    return replace(recipe, epochs=max(1, recipe.dense_epochs), keep="best", model=model)


def build_dense(prepared: Prepared, recipe: Recipe) -> Built:
    """The base with a classifier for the data's labels, before fine-tuning."""
    assert recipe.base is not None
    options = label_options(prepared, recipe)
    labels = {key: value for key, value in options.items() if key != "class_weights"}
    plain, fresh = load_base(recipe.base, offline=prepared.data.source.offline, **labels)
    folder = Path(recipe.base).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else recipe.base
    source = {"base_name": name, "base_sha256": base_hash(plain, fresh), "base_fresh": fresh}
    model = retrofit(plain, **{**options, **recipe.model, **source})
    _check(prepared, recipe, model, fresh)
    return Built(model)


def build_budgeted(prepared: Prepared, recipe: Recipe, dense: Path | None) -> Built:
    """The dense model with gates, its heads ranked; the dense model as a teacher, which labels unlabelled rows.

    `dense` is the directory of the fine-tuned model; None means that the base is fine-tuned already.
    """
    if dense is not None:
        model = BudgetFormerForSequenceClassification.from_pretrained(dense, offline=prepared.data.source.offline)
    else:
        model = build_dense(prepared, dense_recipe(recipe)).model
        invented = [n for n in model.config.base_fresh if not n.startswith(f"{model.base.base_model_prefix}.")]
        if invented and (recipe.selects_heads or _option(recipe, "distill_weight") or prepared.unlabelled):
            raise UsageError(
                f"dense_epochs=0 is for a base that is fine-tuned already, but {recipe.base} has no {invented[0]!r} "
                "for these labels: give dense_epochs of at least 1"
            )
    model.config.temperatures = []  # of answers, not of what a teacher tells
    teacher: Teacher = model.train(False) if _option(recipe, "distill_layers") else None
    rows, logits = prepared.splits["train"], None
    with torch.autocast(model.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
        if prepared.unlabelled is not None:
            answers = score(TorchEngine(model), prepared.unlabelled.table)
            rows, logits = _with_labels_of(answers, rows), answers.logits
        # Without such rows, exits learn from the model's own last stage alone.
        taught = recipe.selects_heads or logits is not None
        if teacher is None and taught and _option(recipe, "distill_weight"):
            labelled = score(TorchEngine(model), prepared.splits["train"]).logits
            teacher = labelled if logits is None else np.concatenate([labelled, logits])
    source = {k: getattr(model.config, k) for k in ("base_name", "base_sha256", "base_fresh")}
    budgeted = retrofit(model.plain(), **{**label_options(prepared, recipe), **recipe.model, **source})
    _check(prepared, recipe, budgeted, budgeted.config.base_fresh)
    if budgeted.config.gate.ranks_layers:
        if budgeted.config.groups and "price_tokens" not in recipe.model["gates"]:
            budgeted.config.gates["price_tokens"] = round(float(prepared.splits["train"].lengths.mean()))
        batches = sample_batches(prepared.splits["train"], budgeted, rows=1024)
        rank_heads(budgeted, batches, ranking=recipe.ranking, seed=prepared.data.source.seed)
    return Built(budgeted, teacher, rows)


def _with_labels_of(answers: Scores, rows: TokenTable) -> TokenTable:
    """Labelled rows, followed by others under the labels that a model gave them."""
    assert rows.labels is not None
    labels = predicted(answers.probabilities, answers.task).astype(rows.labels.dtype)
    return replace(TokenTable.join([rows, answers.table]), labels=np.concatenate([rows.labels, labels]))


def sample_batches(
    table: TokenTable, model: BudgetFormerForSequenceClassification, *, rows: int
) -> Iterator[dict[str, Tensor]]:
    """Rows from all over a split, in batches."""
    sample = sample_rows(len(table), rows)
    lengths = table.lengths[sample]
    for batch in eval_plan(lengths, token_budget=max(_BATCH_TOKENS, int(lengths.max(initial=1)))):
        yield collate(table, sample[batch], model.config.pad_token_id or 0).tensors()


def _option(recipe: Recipe, name: str) -> Any:
    return recipe.model.get(name, getattr(BudgetFormerConfig, name))


def _check(prepared: Prepared, recipe: Recipe, model: BudgetFormerForSequenceClassification, fresh: list[str]) -> None:
    if model.config.max_position_embeddings < recipe.max_length:
        raise UsageError(
            f"max_length={recipe.max_length}, but the base has {model.config.max_position_embeddings} positions: lower "
            "--max-length"
        )
    if len(prepared.tokenizer) > model.config.vocab_size:
        raise ModelError(
            f"the tokenizer has {len(prepared.tokenizer)} pieces and the base {model.config.vocab_size}: they do not "
            "belong together; leave --tokenizer out"
        )
    if recipe.delta:
        model.keep_base(fresh)
