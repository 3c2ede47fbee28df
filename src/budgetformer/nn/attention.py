"""Multi-head attention with a budget: the definition (every head, weighted).

Shapes: B samples, N tokens, D model width, H heads, d = D / H. `mask` is padding: True on real tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budgetformer.errors import UsageError
from budgetformer.nn.allocation import Allocation, Budget, HeadAllocator
from budgetformer.nn.selective import Positions, attend, evaluate_active


class BudgetedAttention(nn.Module):
    """Self-attention whose heads are allocated for each sample by `allocator`.

    `held` names the heads that there are weights for, where the others are never used; None: all.
    """

    def __init__(
        self, width: int, allocator: HeadAllocator, dropout: float = 0.0, held: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        heads = allocator.num_heads
        if heads < 1 or width % heads:
            raise UsageError(
                f"hidden_size={width} is not divisible by num_attention_heads={heads}: every head has the same "
                "width, so choose a number of heads that divides it"
            )
        self.num_heads = heads
        self.dropout = dropout
        self.allocator = allocator
        self.held = None if held is None else list(held)
        inner = width if held is None else len(held) * (width // heads)
        self.qkv = nn.Linear(width, 3 * inner)  # rows head by head, its q, k, v: neighbouring heads are one slice
        self.out = nn.Linear(inner, width)

    def forward(
        self,
        x_BND: Tensor,
        mask_BN: Tensor | None,
        progress: float,
        dial: Budget | None = None,
        positions: Positions | None = None,
    ) -> tuple[Tensor, Allocation]:
        """Allocate heads, evaluate them and project back. -> (B, N, D) and what was allocated."""
        allocation = self.allocator(x_BND, mask_BN, progress, dial)
        y_BND = None
        if not self.training and self.held is None and (mask_BN is None or not self.allocator.reads_padding):
            weights = allocation.weights
            y_BND = evaluate_active(x_BND, mask_BN, allocation.active, weights, self.qkv, self.out, positions)
        return self.evaluate(x_BND, mask_BN, allocation, positions) if y_BND is None else y_BND, allocation

    def evaluate(
        self, x_BND: Tensor, mask_BN: Tensor | None, allocation: Allocation, positions: Positions | None = None
    ) -> Tensor:
        """The definition: all heads are computed, then multiplied by their weights. -> (B, N, D)."""
        B, N, _ = x_BND.shape
        heads = self.num_heads if self.held is None else len(self.held)
        q, k, v = self.qkv(x_BND).view(B, N, heads, 3, -1).permute(3, 0, 2, 1, 4)
        y_BHNd = attend(q, k, v, mask_BN, self.dropout if self.training else 0.0, positions)
        if allocation.weights is not None:
            weights = allocation.weights.reshape(B, -1, 1, 1).to(y_BHNd.dtype)
            y_BHNd = y_BHNd * weights if torch.is_grad_enabled() else y_BHNd.mul_(weights)
        out: Tensor = self.out(y_BHNd.transpose(1, 2).reshape(B, N, -1))
        return out

    @torch.no_grad()
    def select(self, heads: Sequence[int]) -> None:
        """Go on with the weights of these heads, in this order: all of them, or those that are `held`.

        The allocator is not told: what it says of a head is now about the one in its place.
        """
        qkv, out, D, chosen = self.qkv, self.out, len(self.out.weight), list(heads)
        d = D // self.num_heads
        weight, bias = qkv.weight.view(-1, 3 * d, D)[chosen], qkv.bias.view(-1, 3 * d)[chosen]
        back = out.weight.view(D, -1, d)[:, chosen]
        qkv.weight = nn.Parameter(weight.flatten(0, 1), requires_grad=qkv.weight.requires_grad)
        qkv.bias = nn.Parameter(bias.flatten(), requires_grad=qkv.bias.requires_grad)
        out.weight = nn.Parameter(back.flatten(1), requires_grad=out.weight.requires_grad)
        qkv.out_features, out.in_features = len(qkv.weight), out.weight.shape[1]

    def maps(
        self, x_BND: Tensor, mask_BN: Tensor | None, heads: Sequence[int], positions: Positions | None = None
    ) -> Tensor:
        """The attention maps of the given heads alone, recomputed. -> (B, len(heads), N, N)."""
        B, N, D = x_BND.shape
        d = D // self.num_heads
        if wrong := [h for h in heads if not 0 <= h < self.num_heads]:
            raise UsageError(f"attention head {wrong[0]} does not exist: heads are 0 to {self.num_heads - 1}")
        rows = torch.cat([torch.arange(3 * h * d, (3 * h + 2) * d, device=x_BND.device) for h in heads])
        q, k = F.linear(x_BND, self.qkv.weight[rows], self.qkv.bias[rows]).view(B, N, len(heads), 2, d).unbind(3)
        q, k, window_NN = q.transpose(1, 2), k.transpose(1, 2), None
        if positions is not None:
            q, k, window_NN = positions.rotate(q), positions.rotate(k), positions.window_mask(N)
        scores: Tensor = torch.einsum("bhnd,bhmd->bhnm", q, k) / d**0.5
        if window_NN is not None:
            scores = scores.masked_fill(~window_NN, float("-inf"))
        if mask_BN is not None:
            scores = scores.masked_fill(~mask_BN[:, None, None, :], float("-inf"))
        maps = scores.softmax(dim=-1)
        return maps if window_NN is None else maps.nan_to_num(0.0)  # padding may have no real token near it
