"""A pretrained encoder taken apart: embedding, one layer after the other, classifier. So texts can leave in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from budgetformer.models.sites import Budgets


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
        hidden: Tensor = module(hidden_BND, None, budgets=budgets, **rotary)
        return hidden

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
