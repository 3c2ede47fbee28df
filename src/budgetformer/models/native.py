"""Our own encoder as a base: embedding, blocks, pooling and one linear classifier."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from transformers import initialization

from budgetformer.models.config import BudgetFormerConfig
from budgetformer.models.gates import make_gate
from budgetformer.models.sites import Budgets
from budgetformer.models.stages import ExitHead
from budgetformer.nn.allocation import StaticHeads, first_token, pool
from budgetformer.nn.encoder import BudgetedEncoder, Embedding, sinusoids


class NativeBase(nn.Module):
    """Our own encoder, pooling and one linear classifier; called as a pretrained base is."""

    base_model_prefix = "encoder"

    def __init__(self, config: BudgetFormerConfig) -> None:
        super().__init__()
        self.config = config
        assert config.dropout is not None
        assert config.attention_dropout is not None
        self.encoder = BudgetedEncoder(
            [make_gate(config, layer) for layer in range(config.num_hidden_layers)],
            vocab=config.vocab_size, width=config.hidden_size, inner=config.intermediate_size,
            positions=config.max_position_embeddings, dropout=config.dropout,
            attention_dropout=config.attention_dropout, activation=config.hidden_act,
            scale_embeddings=config.scale_embeddings, segments=config.segment_embeddings,
        )  # fmt: skip
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, config.labels)

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embedding.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embedding.tokens = cast("nn.Embedding", value)

    def embed(self, ids_BN: Tensor, segments_BN: Tensor | None) -> Tensor:
        embedded: Tensor = self.encoder.embedding(ids_BN, segments_BN)
        return embedded

    def run_layer(self, layer: int, hidden_BND: Tensor, budgets: Budgets) -> Tensor:
        mask_BN = budgets.mask
        if heads := budgets.map_heads.get(layer):
            budgets.maps[layer] = self.encoder.blocks[layer].attention.maps(hidden_BND, mask_BN, heads)
        hidden_BND, budgets.allocations[layer] = self.encoder.run_block(
            layer, hidden_BND, mask_BN, budgets.progress, budgets.dials[layer]
        )
        return hidden_BND

    def classify(self, hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        pooled_BD = pool(hidden_BND, mask_BN) if self.config.pooling == "mean" else first_token(hidden_BND, mask_BN)
        logits: Tensor = self.classifier(self.dropout(pooled_BD).to(self.classifier.weight.dtype))
        return logits


def init_native(module: nn.Module, config: BudgetFormerConfig) -> None:
    """First values of a module of ours; `initialization` guards weights that were just loaded."""
    if isinstance(module, nn.Linear):
        initialization.normal_(module.weight, std=config.initializer_range)
        initialization.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        scaled = config.scale_embeddings and module.num_embeddings == config.vocab_size
        initialization.normal_(module.weight, std=config.initializer_range if scaled else 1.0)
    elif isinstance(module, nn.LayerNorm):
        initialization.ones_(module.weight)
        initialization.zeros_(module.bias)
    elif isinstance(module, StaticHeads):
        initialization.zeros_(module.budget_logit)
        initialization.zeros_(module.score)
    elif isinstance(module, ExitHead):
        initialization.zeros_(module.outer.weight)
    elif isinstance(module, Embedding):
        initialization.copy_(module.positions, sinusoids(*module.positions.shape))
