"""Evaluating only the active (sample, head) pairs: a head that is not chosen costs nothing.

There are two ways. Blocks, each some neighbouring heads with the samples that use them, are a few ordinary matrix
products on views of the dense layer's own weights, and leave padding out too. Pairs are one batched product, for which
every pair gets its own copy of input and weights: better where the model or the batch is small. Neither keeps a packed
copy of the weights, so none can be stale.

Shapes: B samples, N tokens, D model width, H heads, d = D / H; P active pairs; R rows (the tokens of all samples); in a
block r rows, n samples, m heads, C = m d columns. `mask` is padding: True on real tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Way = Literal["blocks", "pairs", "dense"]
Used = tuple[tuple[bool, ...], ...]  # for each sample, which heads it uses
Spans = tuple[range, ...]  # for each sample, the rows of its real tokens in the flattened batch


class Block(NamedTuple):
    """Neighbouring heads, and the samples that use exactly these together."""

    first: int
    last: int  # one past the last
    samples: list[int]  # ascending
    runs: list[slice]  # their rows in the flattened batch, those that follow each other as one
    lengths: list[int]  # their tokens


class Positions(NamedTuple):
    """Rotary embeddings and an optional sliding window.

    Both depend on distances alone, so a sample's first real token may count as position 0.
    """

    cos: Tensor  # (N, d)
    sin: Tensor  # (N, d)
    window: int | None = None

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys by their positions. (..., N, d) -> (..., N, d)."""
        n, wide = None if exporting() else x.shape[-2], x.float()  # a recorded length would be the example's
        first, second = wide.chunk(2, dim=-1)
        turned = wide * self.cos[:n] + torch.cat((-second, first), dim=-1) * self.sin[:n]
        return turned.to(x.dtype)

    def window_mask(self, length: int) -> Tensor | None:
        """Which token may attend to which, (N, N); None where all may."""
        if self.window is None or (not exporting() and length <= self.window + 1):
            return None
        place = torch.arange(length, device=self.cos.device)
        if exporting():
            place = torch.ones_like(self.cos[:, 0]).cumsum(dim=0)
        return (place[:, None] - place).abs() <= self.window


def attend(
    q_BHNd: Tensor,
    k_BHNd: Tensor,
    v_BHNd: Tensor,
    mask_BN: Tensor | None = None,
    dropout: float = 0.0,
    positions: Positions | None = None,
) -> Tensor:
    """Softmax(Q K^T / sqrt(d)) V for every head; padding is not attended to. -> (B, H, N, d)."""
    mask = None if mask_BN is None else mask_BN[:, None, None, :]
    if positions is not None:
        q_BHNd, k_BHNd = positions.rotate(q_BHNd), positions.rotate(k_BHNd)
        window_NN = positions.window_mask(q_BHNd.shape[2])
        mask = window_NN if mask is None else mask if window_NN is None else mask & window_NN
    if q_BHNd.requires_grad and q_BHNd.dtype == torch.bfloat16 and q_BHNd.device.type == "cpu":
        # Torch's backward pass of this in bf16 takes three to five times as long on CPUs as the one in fp32.
        with torch.autocast("cpu", enabled=False):
            q, k, v = q_BHNd.float(), k_BHNd.float(), v_BHNd.float()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout).to(q_BHNd.dtype)
    return F.scaled_dot_product_attention(q_BHNd, k_BHNd, v_BHNd, attn_mask=mask, dropout_p=dropout)


def exporting() -> bool:
    """Whether a graph is being recorded, which must not depend on the example's texts."""
    return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()


class Costs(NamedTuple):
    """Overheads, in FLOPs that a large matmul does in the same time."""

    block: float  # fixed cost of a block (Python, dispatch); the batch of pairs costs 1.5 times this
    run: float  # a run of rows within a block
    move: float  # copying one element of the input (in both ways) or of the weights (pairs)


# Fitted by benchmarks/fit_costs.py on two AVX-512 cores, where choosing by them takes 1% longer than always choosing
# right.
_CPU = Costs(block=7e6, run=2e5, move=70)
# Not measured: launches dominate, so blocks must be few and large.
_ACCELERATOR = Costs(block=1e9, run=2e8, move=600)


def costs_on(device: str) -> Costs:
    """The overheads of a kind of device."""
    return _CPU if device == "cpu" else _ACCELERATOR


def evaluate_active(
    x_BND: Tensor,
    mask_BN: Tensor | None,
    active_BH: Tensor,
    weights_BH: Tensor | None,
    qkv: nn.Linear,
    out: nn.Linear,
    positions: Positions | None = None,
) -> Tensor | None:
    """Self-attention with the active heads of each sample alone; None where the dense layer is the cheaper way.

    On real tokens it equals the dense layer whose other heads are multiplied by zero; at padding it means nothing.
    """
    (B, N, D), H = x_BND.shape, active_BH.shape[1]
    if exporting():
        return None
    if _CPU.block > 8 * B * N * D * D + 4 * B * N * N * D:
        return None  # less work than a plan
    used = tuple(map(tuple, active_BH.tolist()))
    if mask_BN is None and all(map(all, used)):
        return None  # the frequent case of nothing to leave out must not pay for a plan
    spans = real_tokens(mask_BN, B, N)
    if spans is None:
        return None
    way, blocks = (_plan_one if B == 1 else plan)(used, spans, N, D, x_BND.device.type)
    if way == "blocks":
        return evaluate_blocks(x_BND.reshape(B * N, D), blocks, H, weights_BH, qkv, out, positions).view(B, N, D)
    return evaluate_pairs(x_BND, mask_BN, active_BH, weights_BH, qkv, out, positions) if way == "pairs" else None


def plan(used: Used, spans: Spans, length: int, width: int, device: str) -> tuple[Way, list[Block]]:
    """The cheapest way for a batch, and its blocks."""
    blocks = blocks_of(used, spans)
    return cheapest(blocks, len(used), length, width, len(used[0]), device), blocks


_plan_one = lru_cache(maxsize=1024)(plan)  # of one sample alone, choices come again and again


def real_tokens(mask_BN: Tensor | None, batch: int, length: int) -> Spans | None:
    """The rows of each sample's real tokens in the flattened batch; None if some sample's are not one stretch."""
    if mask_BN is None:
        return tuple(range(row, row + length) for row in range(0, batch * length, length))
    first_B, count_B = mask_BN.int().argmax(dim=1), mask_BN.sum(dim=1)
    place_N = torch.arange(length, device=mask_BN.device)
    inside_BN = (place_N >= first_B[:, None]) & (place_N < (first_B + count_B)[:, None])
    samples = torch.stack([first_B, count_B, (inside_BN != mask_BN).sum(dim=1)], dim=1).tolist()
    if any(outside or not count for _, count, outside in samples):
        return None
    starts = [sample * length + first for sample, (first, _, _) in enumerate(samples)]
    return tuple(range(start, start + count) for start, (_, count, _) in zip(starts, samples, strict=True))


def blocks_of(used: Used, spans: Spans) -> list[Block]:
    """The active pairs in blocks, each pair once.

    The samples' spans of rows must ascend; they may leave rows out (padding) or follow each other (packed tokens).
    """
    users = [[sample for sample, on in enumerate(column) if on] for column in zip(*used, strict=True)]
    blocks, first = [], 0
    for samples, same in groupby(users):
        last = first + len(list(same))
        if samples:
            block_spans = [spans[sample] for sample in samples]
            blocks.append(Block(first, last, samples, _runs(block_spans), [len(span) for span in block_spans]))
        first = last
    return blocks


def cheapest(blocks: list[Block], batch: int, length: int, width: int, num_heads: int, device: str = "cpu") -> Way:
    """The cheapest way; pairs spend time on all of `length` places, the dense layer on all heads too."""
    costs, d = costs_on(device), width // num_heads

    def product(tokens: int) -> int:  # one head of one sample: the projections, then the attention
        return 8 * tokens * width * d + 4 * tokens * tokens * d

    in_blocks, pairs = 0.0, 0
    for first, last, samples, runs, lengths in blocks:
        in_blocks += costs.block + costs.run * len(runs) + (last - first) * sum(map(product, lengths))
        in_blocks += costs.move * width * sum(lengths) if len(runs) > 1 else 0
        pairs += (last - first) * len(samples)
    in_pairs = 1.5 * costs.block + pairs * (product(length) + costs.move * width * (length + 4 * d))
    dense = costs.block + costs.run + num_heads * batch * product(length)
    if min(in_blocks, in_pairs) >= 0.9 * dense:  # estimates err: a gain must be clear
        return "dense"
    return "blocks" if in_blocks <= in_pairs else "pairs"


def evaluate_blocks(
    x_RD: Tensor,
    blocks: list[Block],
    num_heads: int,
    weights_BH: Tensor | None,
    qkv: nn.Linear,
    out: nn.Linear,
    positions: Positions | None = None,
) -> Tensor:
    """Self-attention over the blocks' pairs; the rows of `x_RD` in no block get `out.bias`."""
    R, D = x_RD.shape
    d = D // num_heads
    back_DD = out.weight.t()
    y_RD: Tensor | None = None
    for first, last, samples, runs, lengths in blocks:
        x_rD = x_RD[runs[0]] if len(runs) == 1 else torch.cat([x_RD[run] for run in runs])
        head_rows = slice(3 * first * d, 3 * last * d)  # of q, k, v, head by head
        qkv_r3C = F.linear(x_rD, qkv.weight[head_rows], qkv.bias[head_rows])
        del x_rD  # here and below: a block's tensors must not stand beside the next one's
        weights_nm = None
        if weights_BH is not None:
            neighbours = samples[-1] - samples[0] < len(samples)
            weights_nm = weights_BH[slice(samples[0], samples[-1] + 1) if neighbours else samples, first:last]
        o_rC = _attend_block(qkv_r3C, lengths, weights_nm, d, positions)
        del qkv_r3C
        back_CD = back_DD[first * d : last * d]
        if y_RD is None and len(o_rC) == R:
            y_RD = torch.addmm(out.bias, o_rC, back_CD)
            continue
        y_RD = _biased(out, x_RD) if y_RD is None else y_RD
        back_CD, row = back_CD.to(y_RD.dtype), 0
        for run in runs:  # adding in place, run by run, beats one product and a scattered sum
            rows = run.stop - run.start
            y_RD[run].addmm_(o_rC[row : row + rows], back_CD)
            row += rows
        del o_rC
    return _biased(out, x_RD) if y_RD is None else y_RD


def evaluate_pairs(
    x_BND: Tensor,
    mask_BN: Tensor | None,
    active_BH: Tensor,
    weights_BH: Tensor | None,
    qkv: nn.Linear,
    out: nn.Linear,
    positions: Positions | None = None,
) -> Tensor:
    """Self-attention as one batch of active pairs; a sample without a head gets `out.bias`."""
    N, D, H = *x_BND.shape[1:], active_BH.shape[1]
    sample_P, head_P = active_BH.nonzero(as_tuple=True)
    P, d = len(sample_P), D // H
    weight_PCD, bias_P1C = qkv.weight.view(H, 3 * d, D)[head_P], qkv.bias.view(H, 1, 3 * d)[head_P]
    qkv_PNC = torch.baddbmm(bias_P1C, x_BND[sample_P], weight_PCD.mT)
    q, k, v = qkv_PNC.view(P, N, 3, 1, d).permute(2, 0, 3, 1, 4).unbind()
    o_PNd = attend(q, k, v, None if mask_BN is None else mask_BN[sample_P], positions=positions).squeeze(1)
    if weights_BH is not None:
        o_PNd = o_PNd * weights_BH[sample_P, head_P, None, None].to(o_PNd.dtype)
    y_PND = torch.bmm(o_PNd, out.weight.view(D, H, d).permute(1, 2, 0)[head_P])
    return _biased(out, x_BND).index_add_(0, sample_P, y_PND)


def _biased(out: nn.Linear, x: Tensor) -> Tensor:
    """A fresh tensor of x's shape that holds `out.bias`, in the precision that products have."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return out.bias.to(dtype).expand(x.shape).clone()


def _attend_block(
    qkv_r3C: Tensor, lengths: list[int], weights_nm: Tensor | None, d: int, positions: Positions | None = None
) -> Tensor:
    """Weighted attention within each sample of a block; neighbours of one length go together. -> (r, C)."""
    parts, row, sample = [], 0, 0
    for length, same in groupby(lengths):
        n = len(list(same))
        rows = slice(row, row + n * length)
        q, k, v = qkv_r3C[rows].view(n, length, -1, 3, d).permute(3, 0, 2, 1, 4)
        o_nmNd = attend(q, k, v, positions=positions)
        if weights_nm is not None:
            weights = weights_nm[sample : sample + n, :, None, None].to(o_nmNd.dtype)
            o_nmNd = o_nmNd * weights if torch.is_grad_enabled() else o_nmNd.mul_(weights)
        parts.append(o_nmNd.transpose(1, 2).reshape(n * length, -1))
        row, sample = rows.stop, sample + n
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(spans: Sequence[range]) -> list[slice]:
    """The spans as slices, those that follow each other as one."""
    runs: list[slice] = []
    for span in spans:
        start = runs.pop().start if runs and runs[-1].stop == span.start else span.start
        runs.append(slice(start, span.stop))
    return runs
