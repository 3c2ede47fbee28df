"""A feed-forward layer whose neurons are in groups of neighbours, which are left out as heads are.

Shapes: B samples, N tokens, D model width, I neurons, G groups; R rows (the tokens of all samples), in a block r rows
and C neurons. `mask` is padding: True on real tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budgetformer.nn.allocation import Budget, HeadAllocator
from budgetformer.nn.ranking import FrozenHeads
from budgetformer.nn.selective import Block, blocks_of, costs_on, exporting, real_tokens


class BudgetedFeedForward(nn.Module):
    """outer(activation(inner(x))) with the groups of neurons that `allocator` allows each sample; they are its heads.

    In a gated linear unit, activation(a) * b, `inner` has the rows of all a before those of all b.
    """

    def __init__(
        self,
        allocator: HeadAllocator,
        inner: nn.Linear,
        outer: nn.Linear,
        activation: Callable[[Tensor], Tensor],
        gate_dropout: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.allocator, self.inner, self.outer, self.activation = allocator, inner, outer, activation
        self.dropout = gate_dropout or nn.Identity()  # of the neurons
        self.parts = len(inner.weight) // outer.weight.shape[1]  # 2: a gated linear unit
        self.size = outer.weight.shape[1] // allocator.num_heads  # of a group
        if isinstance(allocator, FrozenHeads):
            self.select(allocator.heads)

    def forward(
        self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Budget | None = None
    ) -> tuple[Tensor, Tensor]:
        """Allocate groups and evaluate them. -> (B, N, D) and the groups' weights, (B, G)."""
        allocation = self.allocator(x_BND, mask_BN, progress, dial)
        active_BG, weights_BG = allocation.active, allocation.weights
        if weights_BG is None:
            return self.evaluate(x_BND, None), active_BG.float()
        if exporting():  # a graph must not hold what the example's texts chose
            every = not self.allocator.per_input and bool(active_BG.all())
            return self.evaluate(x_BND, None if every else weights_BG), weights_BG
        if self.training or torch.is_grad_enabled():
            return self.evaluate(x_BND, weights_BG), weights_BG
        return self.evaluate_active(x_BND, mask_BN, active_BG), weights_BG

    def evaluate(self, x_BND: Tensor, weights_BG: Tensor | None) -> Tensor:
        """The definition: all neurons are computed, then multiplied by their groups' weights. -> (B, N, D)."""
        if not self._neurons:
            return self._bias(x_BND)
        h_BNI = self._activate(self.inner(x_BND))
        if weights_BG is not None:
            weights_BI = weights_BG.repeat_interleave(h_BNI.shape[-1] // weights_BG.shape[1], dim=1)
            h_BNI = h_BNI * weights_BI[:, None].to(h_BNI.dtype)
        out: Tensor = self.outer(h_BNI)
        return out

    def evaluate_active(self, x_BND: Tensor, mask_BN: Tensor | None, active_BG: Tensor) -> Tensor:
        """The same on real tokens, with each sample's active groups alone, at weight 1; all where that is cheaper."""
        B, N, D = x_BND.shape
        used, spans = active_BG[:1], real_tokens(None, 1, B * N)
        if bool((active_BG != used).any()):
            used, spans = active_BG, real_tokens(mask_BN, B, N) or real_tokens(None, B, N)
        assert spans is not None
        blocks = blocks_of(tuple(map(tuple, used.tolist())), spans)
        if self._cost(blocks, D, x_BND.device.type) >= 2 * (1 + self.parts) * B * N * D * self._neurons:
            return self.evaluate(x_BND, None if bool(active_BG.all()) else active_BG.float())
        return self.evaluate_blocks(x_BND.reshape(B * N, D), blocks).view(B, N, D)

    def evaluate_blocks(self, x_RD: Tensor, blocks: Sequence[Block]) -> Tensor:
        """Neighbouring groups together, on views of the weights; the rows of `x_RD` in no block get the bias."""
        y_RD = None
        for first, last, _, runs, _ in blocks:
            neurons = slice(first * self.size, last * self.size)
            x_rD = x_RD[runs[0]] if len(runs) == 1 else torch.cat([x_RD[run] for run in runs])
            bias = None if self.inner.bias is None else self._rows(self.inner.bias, neurons)
            h_rC = self._activate(F.linear(x_rD, self._rows(self.inner.weight, neurons), bias))
            if y_RD is None and len(x_rD) == len(x_RD):
                y_RD = F.linear(h_rC, self.outer.weight[:, neurons], self.outer.bias)
                continue
            part_rD, row = F.linear(h_rC, self.outer.weight[:, neurons]), 0
            y_RD = self._bias(x_RD).to(part_rD.dtype, copy=True) if y_RD is None else y_RD
            for run in runs:
                y_RD[run] += part_rD[row : row + run.stop - run.start]
                row += run.stop - run.start
        return self._bias(x_RD) if y_RD is None else y_RD

    @property
    def _neurons(self) -> int:
        return self.outer.weight.shape[1]

    def _cost(self, blocks: Sequence[Block], width: int, device: str) -> float:
        """What blocks cost, in FLOPs that a large product does in the same time."""
        costs, work = costs_on(device), 0.0
        for first, last, _, runs, lengths in blocks:
            product = 2 * (1 + self.parts) * width * (last - first) * self.size
            move = costs.move * width if len(runs) > 1 else 0
            work += costs.block + costs.run * len(runs) + (product + move) * sum(lengths)
        return work

    def select(self, groups: Sequence[int]) -> None:
        """Go on with the neurons of these groups, in this order; the allocator is not told."""
        first = torch.tensor(groups, dtype=torch.long)[:, None] * self.size
        self.select_neurons((first + torch.arange(self.size)).flatten())

    def select_neurons(self, neurons: Tensor) -> None:
        """Go on with these neurons, in this order."""
        neurons, trained = neurons.to(self.outer.weight.device), self.outer.weight.requires_grad
        for name, rows in list(self.inner.named_parameters()):
            chosen = nn.Parameter(self._rows(rows.detach(), neurons), requires_grad=rows.requires_grad)
            setattr(self.inner, name, chosen)
        self.outer.weight = nn.Parameter(self.outer.weight.detach()[:, neurons], requires_grad=trained)
        self.inner.out_features, self.outer.in_features = self.parts * len(neurons), len(neurons)

    def _rows(self, inner: Tensor, neurons: Tensor | slice) -> Tensor:
        """Those of some neurons; without a copy for a slice where there is one part."""
        return inner.view(self.parts, -1, *inner.shape[1:])[:, neurons].flatten(0, 1)

    def _activate(self, h: Tensor) -> Tensor:
        if self.parts == 2:
            a, b = h.chunk(2, dim=-1)
            h = self.activation(a) * b
        else:
            h = self.activation(h)
        out: Tensor = self.dropout(h)
        return out

    def _bias(self, x_BND: Tensor) -> Tensor:
        """What is left without neurons."""
        return torch.zeros_like(x_BND) if self.outer.bias is None else self.outer.bias.expand_as(x_BND)
