"""Pretrained encoders: found, checked, loaded, hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from budgetformer.errors import ModelError
from budgetformer.models.config import BudgetFormerConfig


def read_base(name: str, *, offline: bool = False, **options: Any) -> PreTrainedConfig:
    """The config of a base; what is wrong with it, or with the options, is said before anything is loaded."""
    folder = Path(name).expanduser()
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder) if folder.is_dir() else name, local_files_only=offline or folder.is_dir()
        )
    except ModelError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"base {name!r} cannot be loaded ({reason}): give a model directory or a hub name") from None
    if folder.is_dir():
        check_weights(folder)
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
    model, info = AutoModelForSequenceClassification.from_pretrained(
        path, **place, **labels, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    align_weights(model)
    return model, sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})


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


def check_weights(folder: Path) -> None:
    """Refuse a model folder whose weights are missing, pickled, truncated or corrupt."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = next((f for ending in ("*.bin", "*.pt", "*.pth", "*.pkl") for f in folder.glob(ending)), None)
        if pickled:
            raise ModelError(
                f"{pickled} is a pickle file, which can run code and is never loaded: convert it to "
                "model.safetensors on a machine that you can afford to lose"
            )
        raise ModelError(f"{folder} has no model.safetensors: give the directory of a saved model")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is not a readable safetensors file ({error}): it is corrupt or was cut short; copy or save "
                "it again"
            ) from error
