"""A pretrained encoder taken apart: embedding, one layer after the other, classifier. So texts can leave in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from budgetformer.models.sites import Budgets, RetrofitFeedForward


class Layers(Protocol):
    """What a model runs: our own encoder, or a pretrained one."""

    def embed(self, ids_BN: Tensor, segments_BN: Tensor | None) -> Tensor:
        """Token ids -> the first hidden states. (B, N) -> (B, N, D)."""
        ...

    def run_layer(self, layer: int, hidden_BND: Tensor, budgets: Budgets) -> Tensor:
        """One layer, which takes from `budgets` what it needs and leaves its allocation there."""
        ...

    def classify(self, hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        """The last hidden states -> logits. (B, N, D) -> (B, C)."""
        ...


class PretrainedLayers:
    """The parts of a Hugging Face sequence classifier whose attention is ours."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.encoder: Any = getattr(model, model.base_model_prefix)
        self.kind = model.config.model_type
        stack = {"distilbert": "transformer", "modernbert": None}.get(self.kind, "encoder")
        self.layers: Sequence[nn.Module] = getattr(self.encoder, stack).layer if stack else self.encoder.layers

    def embed(self, ids_BN: Tensor, segments_BN: Tensor | None) -> Tensor:
        segments = {} if segments_BN is None else {"token_type_ids": segments_BN}
        hidden: Tensor = self.encoder.embeddings(input_ids=ids_BN, **segments)
        if hasattr(self.encoder, "embeddings_project"):
            hidden = self.encoder.embeddings_project(hidden)
        return hidden

    def run_layer(self, layer: int, hidden_BND: Tensor, budgets: Budgets) -> Tensor:
        module: Any = self.layers[layer]
        rotary = {}
        if self.kind == "modernbert":
            places = torch.arange(hidden_BND.shape[1], device=hidden_BND.device)[None]
            rotary["position_embeddings"] = self.encoder.rotary_emb(hidden_BND, places, module.attention_type)
        if not any(isinstance(part, RetrofitFeedForward) for part in module.children()):
            return cast("Tensor", module(hidden_BND, None, budgets=budgets, **rotary))
        run: Callable[..., Tensor] = partial(
            {"distilbert": _distilbert, "modernbert": _modernbert}.get(self.kind, _bert), module
        )
        if module.gradient_checkpointing and module.training:
            return cast("Tensor", module._gradient_checkpointing_func(run, hidden_BND, budgets, rotary))
        return run(hidden_BND, budgets, rotary)

    def classify(self, hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        model = self.model
        if self.kind == "bert":
            logits: Tensor = model.classifier(model.dropout(self.encoder.pooler(hidden_BND)))
        elif self.kind == "distilbert":
            logits = model.classifier(model.dropout(model.pre_classifier(hidden_BND[:, 0]).relu()))
        elif self.kind == "modernbert":
            pooled = self._modernbert_pooled(self.encoder.final_norm(hidden_BND), mask_BN)
            logits = model.classifier(model.drop(model.head(pooled)))
        else:
            logits = model.classifier(hidden_BND)
        return logits

    def _modernbert_pooled(self, hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        if self.model.config.classifier_pooling == "cls":
            return hidden_BND[:, 0]
        mask = hidden_BND.new_ones(hidden_BND.shape[:2], dtype=torch.bool) if mask_BN is None else mask_BN
        return (hidden_BND * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


# A layer's `forward` hands budgets to its attention alone; these hand them to its feed-forward part too.
def _bert(layer: Any, hidden: Tensor, budgets: Budgets, _: Mapping[str, Any]) -> Tensor:
    attended = layer.attention(hidden, None, budgets=budgets)[0]
    out: Tensor = layer.output(layer.intermediate(attended, budgets), attended)
    return out


def _distilbert(layer: Any, hidden: Tensor, budgets: Budgets, _: Mapping[str, Any]) -> Tensor:
    attended = layer.sa_layer_norm(layer.attention(hidden, budgets=budgets)[0] + hidden)
    out: Tensor = layer.output_layer_norm(layer.ffn(attended, budgets) + attended)
    return out


def _modernbert(layer: Any, hidden: Tensor, budgets: Budgets, rotary: Mapping[str, Any]) -> Tensor:
    attended: Tensor = hidden + layer.attn(layer.attn_norm(hidden), budgets=budgets, **rotary)[0]
    out: Tensor = attended + layer.mlp(layer.mlp_norm(attended), budgets)
    return out
