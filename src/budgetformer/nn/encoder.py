"""The network, top to bottom: token embedding, sinusoidal positions, post-norm blocks.

The standard Transformer is the same encoder with another allocator.
Shapes: B samples, N tokens, D model width. `mask` is padding: True on real tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from budgetformer.errors import UsageError
from budgetformer.nn.allocation import Allocation, Budget, HeadAllocator
from budgetformer.nn.attention import BudgetedAttention
from budgetformer.nn.selective import exporting

Activation = Literal["relu", "gelu"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class EncoderOutput(NamedTuple):
    """What the encoder computed: the last hidden states, each layer's allocation, the maps that were asked for."""

    hidden: Tensor  # (B, N, D)
    allocations: tuple[Allocation, ...]
    maps: dict[int, Tensor]  # layer -> (B, heads asked for, N, N)


def sinusoids(length: int, width: int) -> Tensor:
    """sin and cos of position / 10000^(2i/D), interleaved. -> (length, width)."""
    position = torch.arange(length, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate[: width // 2])
    return table


class Embedding(nn.Module):
    """Word pieces plus sinusoidal positions; plus which text of a pair a piece is from, where `segments` is set."""

    def __init__(
        self, vocab: int, width: int, positions: int, dropout: float, scale: bool, segments: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.segments = nn.Embedding(2, width) if segments else None
        self.scale = math.sqrt(width) if scale else 1.0
        self.dropout = nn.Dropout(dropout)
        self.positions: Tensor
        self.register_buffer("positions", sinusoids(positions, width), persistent=False)

    def forward(self, ids_BN: Tensor, segments_BN: Tensor | None = None) -> Tensor:
        length, limit = ids_BN.shape[1], self.positions.shape[0]
        if length > limit:
            raise UsageError(
                f"the input has {length} tokens but the model has {limit} positions: truncate the text "
                f"(tokenizer(..., truncation=True, max_length={limit})) or train with a larger "
                "max_position_embeddings"
            )
        x_BND = self.tokens(ids_BN) * self.scale + self.positions[:length]
        if self.segments is not None:
            x_BND = x_BND + self.segments(torch.zeros_like(ids_BN) if segments_BN is None else segments_BN)
        out: Tensor = self.dropout(x_BND)
        return out


class Block(nn.Module):
    """Attention and feed-forward, each followed by a residual sum and a LayerNorm (post-norm)."""

    def __init__(
        self, attention: BudgetedAttention, width: int, inner: int, dropout: float, activation: Activation
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise UsageError(f"hidden_act={activation!r}: give one of {', '.join(_ACTIVATIONS)}")
        self.attention = attention
        self.attention_norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, inner)
        self.outer = nn.Linear(inner, width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.activation = _ACTIVATIONS[activation]

    def forward(
        self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Budget | None
    ) -> tuple[Tensor, Allocation]:
        y_BND, allocation = self.attention(x_BND, mask_BN, progress, dial)
        x_BND = self.attention_norm(x_BND + self.dropout(y_BND))
        everywhere = self.training or self.attention.allocator.reads_padding or exporting()
        if mask_BN is None or everywhere:
            return self.feedforward(x_BND), allocation
        return x_BND.masked_scatter(mask_BN[..., None], self.feedforward(x_BND[mask_BN])), allocation

    def feedforward(self, x: Tensor) -> Tensor:
        """Position by position, so padding may be left out. (..., D) -> (..., D)."""
        inner = self.inner(x)
        in_place = self.activation is F.relu and not torch.is_grad_enabled()  # the largest tensor of a layer
        inner = inner.relu_() if in_place else self.activation(inner)
        out: Tensor = self.feedforward_norm(x + self.dropout(self.outer(inner)))
        return out


class BudgetedEncoder(nn.Module):
    """A stack of blocks over embedded word pieces; one allocator per layer."""

    gradient_checkpointing = False
    _gradient_checkpointing_func: Callable[..., Any] = staticmethod(checkpoint)

    def __init__(
        self,
        allocators: Sequence[HeadAllocator],
        *,
        vocab: int,
        width: int,
        inner: int,
        positions: int,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        activation: Activation = "relu",
        scale_embeddings: bool = False,
        segments: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocab, width, positions, dropout, scale_embeddings, segments)
        self.blocks: Sequence[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(BudgetedAttention(width, allocator, attention_dropout), width, inner, dropout, activation)
            for allocator in allocators
        )

    def forward(
        self,
        ids_BN: Tensor,
        mask_BN: Tensor | None,
        progress: float,
        dial: Budget | None = None,
        map_heads: Mapping[int, Sequence[int]] | None = None,
        segments_BN: Tensor | None = None,
    ) -> EncoderOutput:
        """Encode a batch; `map_heads` names, by layer, the heads whose attention maps are wanted."""
        if wrong := [layer for layer in map_heads or {} if not 0 <= layer < len(self.blocks)]:
            raise UsageError(f"layer {wrong[0]} does not exist: layers are 0 to {len(self.blocks) - 1}")
        x_BND = self.embedding(ids_BN, segments_BN)
        allocations, maps = [], {}
        for layer, block in enumerate(self.blocks):
            if map_heads and map_heads.get(layer):
                maps[layer] = block.attention.maps(x_BND, mask_BN, map_heads[layer])
            x_BND, allocation = self.run_block(layer, x_BND, mask_BN, progress, dial)
            allocations.append(allocation)
        return EncoderOutput(x_BND, tuple(allocations), maps)

    def run_block(
        self, layer: int, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Budget | None
    ) -> tuple[Tensor, Allocation]:
        """One layer, whose activations are computed again for the gradient where that saves memory."""
        block = self.blocks[layer]
        if self.gradient_checkpointing and self.training:
            result: tuple[Tensor, Allocation] = self._gradient_checkpointing_func(block, x_BND, mask_BN, progress, dial)
            return result
        return block(x_BND, mask_BN, progress, dial)  # type: ignore[no-any-return]


def padding_mask(mask: Tensor | None) -> Tensor | None:
    """A checked boolean mask, or None where nothing is padded (the kernels are faster without)."""
    if mask is None:
        return None
    mask = mask.bool()
    shortest = int(mask.sum(dim=1).min())
    if shortest == 0:
        row = int(mask.any(dim=1).logical_not().nonzero()[0, 0])
        raise UsageError(f"attention_mask: sample {row} has no real token; give every text at least one")
    return None if shortest == mask.shape[1] else mask
