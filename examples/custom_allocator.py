"""Heads by a rule of your own: one for every eight tokens of a text; what is not active is not computed."""

import torch
from torch import Tensor

from budgetformer.nn import Allocation, BudgetedEncoder, Dial, HeadAllocator


class HeadsByLength(HeadAllocator):
    """Any rule will do that says, for each sample, which heads are active and how much each of them weighs."""

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None, progress: float, dial: Dial | None = None) -> Allocation:
        B, N, _ = x_BND.shape
        tokens = torch.full((B,), N) if mask_BN is None else mask_BN.sum(dim=1)
        heads = (tokens // 8).clamp(1, self.num_heads)
        active = torch.arange(self.num_heads) < heads[:, None]
        return Allocation(
            budget=heads / self.num_heads,
            relevance=active / heads[:, None],
            heads=heads,
            active=active,
            weights=active * self.num_heads / heads[:, None],
        )


encoder = BudgetedEncoder([HeadsByLength(8) for _ in range(2)], vocab=1000, width=64, inner=128, positions=128).eval()
lengths = torch.tensor([6, 20, 64])
mask = torch.arange(64) < lengths[:, None]
ids = torch.randint(1000, mask.shape)
with torch.inference_mode():
    encoded = encoder(ids, mask, progress=1.0)
for length, heads in zip(lengths, encoded.allocations[0].heads, strict=True):
    print(f"{length} tokens: {heads} of 8 heads")
