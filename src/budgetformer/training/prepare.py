"""Data, tokenizer and model config, fitted to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from budgetformer.data.dataset import DataSet, Texts, open_data, stream_unlabelled
from budgetformer.data.locate import DataSource
from budgetformer.data.splits import Hashes, text_hash
from budgetformer.data.tokenizer import load_tokenizer, train_tokenizer
from budgetformer.data.tokens import TokenTable, encode_split, encode_stream
from budgetformer.errors import DataError, UsageError
from budgetformer.models.model import BudgetFormerConfig
from budgetformer.runs.files import write_files
from budgetformer.runs.record import TASKS
from budgetformer.training.recipe import Recipe


class Unlabelled(NamedTuple):
    """Texts without labels, and the `text_hash` of each."""

    table: TokenTable
    hashes: Hashes


@dataclass(frozen=True, eq=False)
class Prepared:
    """Data as the model sees it."""

    data: DataSet
    tokenizer: PreTrainedTokenizerFast
    splits: dict[str, TokenTable]
    unlabelled: Unlabelled | None = None

    @property
    def final(self) -> str:
        """The split that results are reported on."""
        return "test" if "test" in self.splits else "validation"


def prepare(source: DataSource, recipe: Recipe, folder: Path, log: Callable[[str], None]) -> Prepared:
    """Open the data, get or train the tokenizer, encode the splits."""
    if source.unlabelled is not None and recipe.base is None:
        raise UsageError("--unlabelled needs --base: the fine-tuned encoder labels those rows")
    data = open_data(source)
    log(data.columns_chosen)
    for warning in data.warnings:
        log(f"warning: {warning}")
    tokenizer = _tokenizer(data, recipe, folder, log)
    splits = {
        name: encode_split(split, data, tokenizer.backend_tokenizer, recipe.max_length)
        for name, split in data.splits.items()
    }
    for name, split in splits.items():
        truncated = int(split.truncated.sum())
        cut = f", {truncated} cut at {recipe.max_length} tokens" if truncated else ""
        log(f"{name}: {len(split)} rows, {split.lengths.mean():.0f} tokens on average{cut}")
    return Prepared(data, tokenizer, splits, _unlabelled(data, recipe, tokenizer, log) if source.unlabelled else None)


def _unlabelled(
    data: DataSet, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, log: Callable[[str], None]
) -> Unlabelled:
    stream = partial(stream_unlabelled, data)
    table = encode_stream(stream, data, tokenizer.backend_tokenizer, recipe.max_length, labelled=False)
    if not len(table):
        raise DataError(f"{data.source.unlabelled} has no text that is not in the training, validation or test rows: "
                        "give other texts, or leave --unlabelled out")  # fmt: skip
    log(f"unlabelled: {len(table)} rows, {table.lengths.mean():.0f} tokens on average, which the dense model labels")
    rows = stream(lambda warning: log(f"warning: {warning}"))
    return Unlabelled(table, np.array([text_hash(row.text, row.text_pair) for row in rows], np.uint64))


def _tokenizer(data: DataSet, recipe: Recipe, folder: Path, log: Callable[[str], None]) -> PreTrainedTokenizerFast:
    if (folder / "tokenizer.json").exists():  # a resumed run, or another process was first
        return load_tokenizer(folder, offline=True)
    if name := recipe.tokenizer or recipe.base:
        tokenizer = load_tokenizer(name, offline=data.source.offline)
    else:
        log(f"training the tokenizer on {data.splits['train'].rows} texts")
        tokenizer = train_tokenizer(Texts(data.splits["train"]), vocab_size=recipe.vocab_size)
    save_tokenizer(tokenizer, folder)
    return load_tokenizer(folder, offline=True)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer's files; tokenizer.json, the last, says that they are all there."""
    write_files(folder, tokenizer.save_pretrained, last="tokenizer.json")


def label_options(prepared: Prepared, recipe: Recipe) -> dict[str, Any]:
    """What a model's config has to know of the data's labels."""
    data = prepared.data
    options: dict[str, Any] = {"problem_type": TASKS[data.task]}
    if data.task == "regression":
        options["num_labels"] = 1
    else:
        options["id2label"] = dict(enumerate(data.labels))
        options["label2id"] = {label: i for i, label in enumerate(data.labels)}
    if recipe.class_weights == "balanced":
        if data.task != "single":
            raise UsageError("class_weights=balanced is for single-label classification: give none")
        labels = np.asarray(prepared.splits["train"].labels)
        rarity = len(labels) / (len(data.labels) * np.maximum(1, np.bincount(labels, minlength=len(data.labels))))
        options["class_weights"] = rarity.tolist()
    return options


def make_config(prepared: Prepared, recipe: Recipe) -> BudgetFormerConfig:
    """The model that the recipe asks for, fitted to the data's labels and the tokenizer's vocabulary."""
    data, tokenizer = prepared.data, prepared.tokenizer
    options = {"vocab_size": len(tokenizer), **label_options(prepared, recipe)}
    options["pad_token_id"] = tokenizer.pad_token_id
    options["segment_embeddings"] = data.is_pair and recipe.preset != "paper"
    config = BudgetFormerConfig.preset(recipe.preset, **{**options, **recipe.model})
    if config.max_position_embeddings < recipe.max_length:
        raise UsageError(
            f"max_length={recipe.max_length} exceeds max_position_embeddings={config.max_position_embeddings}: "
            "lower the one or raise the other (--set model.max_position_embeddings=...)"
        )
    return config
