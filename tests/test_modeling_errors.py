"""Bad configs, inputs and files: each a clear error that names the field and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from budgetformer import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.errors import ModelError, UsageError


def tiny(**options: Any) -> BudgetFormerForSequenceClassification:
    config = BudgetFormerConfig.preset("tiny", **{"vocab_size": 50, "num_labels": 3, **options})
    return BudgetFormerForSequenceClassification(config).eval()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 100, "num_attention_heads": 8}, "hidden_size=100 is not divisible by num_attention_heads=8"),
        ({"min_head": 2}, "'min_head' is not known: did you mean 'gates.min_heads'"),
        ({"wormhole": 2}, "'wormhole' is not known: known keys: .*gates"),
        ({"gates": "learned"}, "gates='learned': give a table such as"),
        ({"gates": {"kind": "some"}}, "gates.kind='some': give one of learned, all"),
        ({"gates": {"kind": "leaned"}}, "did you mean 'learned'"),
        ({"gates": {"kind": "ranked"}}, "gates.kind='ranked': give one of .* for a model without a base"),
        ({"gates": {"kind": "fixed"}}, "gates of the kind 'fixed' need fixed_budget"),
        ({"gates": {"fixed_budget": 0.5}}, "'learned' .it is one of the kind fixed."),
        ({"gates": {"kind": "fixed", "fixed_budget": 1.5}}, "fixed_budget=1.5: give the fraction"),
        (
            {"gates": {"min_haeds": 1}},
            "gates.min_haeds is not an option of .* did you mean 'min_heads'",
        ),
        ({"gates": {"kind": "all", "tau_min": 1.0}}, "gates.tau_min is not an option of the kind 'all' .* takes none"),
        ({"gates": {"tau_min": "low"}}, "gates.tau_min='low': give float"),
        ({"gates": {"min_heads": True}}, "gates.min_heads=True: give int"),
        ({"distill_layers": 1.0}, "distill_layers=1.0: it is for a model with a base"),
        ({"format_version": 1}, "format_version=1: leave it out"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: give a whole number"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"dropout": 1.0}, "dropout=1.0: give a number in"),
        ({"pooling": "last"}, "pooling='last': give mean or first"),
        ({"hidden_act": "swish"}, "hidden_act='swish': give relu or gelu"),
        ({"training_progress": 1.2}, "training_progress=1.2: it is t/T"),
        ({"class_weights": [1.0, 2.0]}, "class_weights has 2 values for 3 labels"),
        ({"gates": {"target_budget": [0.5]}}, "target_budget has 1 values for 2 layers"),
        ({"gates": {"entropy": "reversed"}}, "entropy='reversed': give intended, printed or off"),
        ({"gates": {"tau_min": 0.0}}, "tau_min=0.0"),
        ({"gates": {"min_heads": 9}}, "min_heads=9 exceeds the 4 heads"),
    ],
)
def test_bad_configs_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tiny(**options)


def test_unknown_preset() -> None:
    with pytest.raises(UsageError, match="preset 'huge' is not known: give one of tiny, small, paper, recommended"):
        BudgetFormerConfig.preset("huge")


@pytest.mark.parametrize(
    ("ids", "extra", "message"),
    [
        ([[1, 50]], {}, "input_ids contains 50, outside the vocabulary of 50: use the tokenizer"),
        ([[1, -1]], {}, "input_ids contains -1"),
        ([[]], {}, r"input_ids has shape \(1, 0\)"),
        ([[1, 2]], {"attention_mask": [[0, 0]]}, "sample 0 has no real token"),
        ([[1] * 129], {}, "129 tokens but the model has 128 positions: truncate"),
        ([[1, 2]], {"labels": [3]}, "labels hold values from 3 to 3, but the model has num_labels=3"),
        ([[1, 2]], {"labels": [-100]}, "labels hold values from -100"),
        ([[1, 2]], {"labels": [0.5]}, "give whole numbers from 0 to 2"),
        ([[1, 2]], {"progress": 1.5}, "progress=1.5: it is t/T"),
        ([[1, 2]], {"budget": "fixed:2"}, "outside \\[0, 1\\]"),
        ([[1, 2]], {"attention_heads": {5: [0]}}, "layer 5 does not exist"),
    ],
)
def test_bad_inputs_are_refused(ids: list[list[int]], extra: dict[str, Any], message: str) -> None:
    arguments = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in extra.items()}
    with pytest.raises(UsageError, match=message):
        tiny()(torch.tensor(ids, dtype=torch.long), **arguments)


def test_multi_label_targets_need_one_column_a_label() -> None:
    model = tiny(problem_type="multi_label_classification")
    with pytest.raises(UsageError, match="one 0 or 1 for each of 3 labels"):
        model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 0]]))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny().save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, **options: Any) -> None:
    BudgetFormerForSequenceClassification.from_pretrained(folder, **options)


def test_truncated_weights_are_named(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file.*cut short"):
        load(saved)


def test_corrupt_weights_are_named(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        load(saved)


def test_pickled_weights_are_never_loaded(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(b"\x80\x04whatever")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle file, which can run code"):
        load(saved)
    with pytest.raises(ModelError, match="use_safetensors=False: pickled weights"):
        load(saved, use_safetensors=False)


def test_missing_weights_are_named(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load(saved)


def test_a_key_of_a_newer_transformers_in_a_saved_config_is_a_warning(saved: Path) -> None:
    file = saved / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "brand_new": 2}))
    with pytest.warns(UserWarning, match="the key 'brand_new', which is not known here and is ignored"):
        load(saved)


@pytest.mark.parametrize("version", [None, 1, 99])
def test_another_format_of_the_config_is_refused(saved: Path, version: int | None) -> None:
    file = saved / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": version}))
    with pytest.raises(ModelError, match=f"has format_version {version}, and 3 is read.* train again"):
        load(saved)
