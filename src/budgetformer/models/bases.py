"""Pretrained encoders: found, checked, loaded, hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from budgetformer.errors import ModelError
from budgetformer.models.config import BudgetFormerConfig
from budgetformer.runs.files import COPY_AGAIN, check_hashes, named_read_errors, read_json


def read_base(name: str, *, offline: bool = False, **options: Any) -> PreTrainedConfig:
    """The config of a base; what is wrong with it, or with the options, is said before anything is loaded."""
    folder = Path(name).expanduser()
    if (folder / "config.json").exists():
        check_weights(folder)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder) if folder.is_dir() else name, local_files_only=offline or folder.is_dir()
        )
    except ModelError:
        raise
    except Exception as error:  # transformers has no common class for what may be wrong with a config
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"base {name!r} cannot be loaded ({reason}): give a model directory or a hub name") from None
    BudgetFormerConfig.over(config.base_config if isinstance(config, BudgetFormerConfig) else config, **options)
    return config


def load_base(name: str, *, offline: bool = False, **labels: Any) -> tuple[PreTrainedModel, list[str]]:
    """A pretrained encoder with a classifier for these labels, and the names of the weights it had to invent.

    The hub is asked only for a name that is no path here, and never if `offline`. A run of ours gives its plain model.
    """
    config, folder = read_base(name, offline=offline), Path(name).expanduser()
    place: dict[str, Any] = {"local_files_only": offline or folder.is_dir()}
    path = str(folder) if folder.is_dir() else name
    if isinstance(config, BudgetFormerConfig):
        has, asked = config.label_names, list(labels.get("id2label", config.id2label or {}).values())
        if has != [str(label) for label in asked]:
            raise ModelError(
                f"base {name!r} has the labels {', '.join(has)}, and these are wanted: {', '.join(map(str, asked))}; "
                f"give the encoder that it was made from ({config.base_name})"
            )
        return AutoModelForSequenceClassification.from_pretrained(path, **place).plain(), []
    with named_read_errors(folder, "give a model directory or a hub name"):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, **place, **labels, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    align_weights(model)
    _reorder_outputs(model, config.id2label or {}, labels.get("id2label") or {})
    return model, sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})


def _reorder_outputs(model: PreTrainedModel, base_labels: dict[Any, str], labels: dict[Any, Any]) -> None:
    """A classifier that knows the same labels in another order answers with them in ours."""
    theirs, ours = ([str(name) for _, name in sorted(names.items())] for names in (base_labels, labels))
    if theirs == ours or sorted(theirs) != sorted(ours):
        return
    encoder = f"{model.base_model_prefix}."
    linear = (m for name, m in model.named_modules() if isinstance(m, nn.Linear) and not name.startswith(encoder))
    *_, outer = linear
    order = [theirs.index(label) for label in ours]
    outer.weight.data = outer.weight.data[order]
    if outer.bias is not None:
        outer.bias.data = outer.bias.data[order]


def align_weights(model: PreTrainedModel) -> None:
    """Copy what was just loaded: the mapped file is not aligned, which changes the last bits of a GEMM."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def base_hash(model: PreTrainedModel, fresh: Sequence[str]) -> str:
    """The SHA-256 of an encoder's weights, without its classifier and what it had to invent."""
    digest, prefix = hashlib.sha256(), f"{model.base_model_prefix}."
    for name, tensor in sorted(model.state_dict().items()):
        if name.startswith(prefix) and name not in fresh:
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# The sizes in the configs of all architectures; a delta has weights for the first of them alone.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "num_labels",
          "max_position_embeddings", "type_vocab_size", "dim", "hidden_dim", "n_layers", "n_heads")  # fmt: skip
_POSITIONS = 2**17  # may have no weights


def check_weights(folder: Path) -> None:
    """Refuse a model folder whose weights are missing, pickled, truncated, corrupt or too small for its config.json."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = next((f for ending in ("*.bin", "*.pt", "*.pth", "*.pkl") for f in folder.glob(ending)), None)
        if pickled:
            raise ModelError(
                f"{pickled} is a pickle file, which can run code and is never loaded: convert it to "
                "model.safetensors on a machine that you can afford to lose"
            )
        raise ModelError(f"{folder} has no model.safetensors: give the directory of a saved model")
    shapes: list[list[int]] = []
    for file in files:
        with named_read_errors(file, "copy or save it again"):
            file.open("rb").close()  # of a file that may not be read, safetensors says that it does not exist
            try:
                with safe_open(file, framework="pt") as tensors:
                    shapes += [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
            except SafetensorError as error:
                raise ModelError(
                    f"{file} is not a readable safetensors file ({error}): it is corrupt or was cut short; copy or "
                    "save it again"
                ) from error
    if (record := folder / "run.json").exists():
        hashes = read_json(record, COPY_AGAIN).get("sha256")
        check_hashes(folder, hashes if isinstance(hashes, dict) else {}, ".safetensors")
    if (file := folder / "config.json").exists():
        _check_sizes(file, shapes)


def _check_sizes(file: Path, shapes: list[list[int]]) -> None:
    """Refuse sizes that no tensor has, before anything of that size is built."""
    config = read_json(file, "copy or save the model again")
    layers, largest = len(shapes), max((size for shape in shapes for size in shape), default=0)
    base = config.get("base")
    sizes = {**(base if isinstance(base, dict) else {}), **config}
    for key in _SIZES[:3] if config.get("delta") else _SIZES:
        most = layers if key.endswith("layers") else max(largest, _POSITIONS) if "position" in key else largest
        value = sizes.get(key, 0)
        if not isinstance(value, int) or value > most:
            raise ModelError(f"{file} has {key} {value!r:.60}, and the weights beside it have room for {most}: "
                             "copy or save the model again")  # fmt: skip
