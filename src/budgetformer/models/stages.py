"""A batch through the stages of a model: words, layers up to an exit, its head, and so on to the last layer.

Rows that leave are taken out of the batch and the others go on together. `exits.Exits.leave`, applied to the logits of
all stages, is the definition.

Shapes: B samples, N tokens, D model width, S stages, C outputs, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from budgetformer.exits import AfterStage, Exits, StageResult
from budgetformer.models.config import BudgetFormerConfig
from budgetformer.models.layers import Layers
from budgetformer.models.sites import Budgets
from budgetformer.nn.allocation import Allocation, first_token, pool
from budgetformer.nn.encoder import padding_mask
from budgetformer.nn.objective import distillation_loss, task_loss
from budgetformer.words import Words


class Staged(NamedTuple):
    """What a batch came to: the answers where each sample left, or those of all stages where none could leave."""

    logits: Tensor  # (B, C)
    exits: Tensor  # (B,) the stage at which a sample left
    stage_logits: Tensor | None  # (B, S, C)
    states: list[Tensor]  # (B, N, D) after each layer, where they were asked for
    allocations: tuple[Allocation, ...]  # by layer; zero for samples that had left


class WordsStage(nn.Module):
    """The linear model over words, as weights of the network that are fitted beforehand and not trained with it."""

    def __init__(self, buckets: int, outputs: int) -> None:
        super().__init__()
        self.idf: Tensor
        self.weights: Tensor
        self.bias: Tensor
        self.register_buffer("idf", torch.zeros(buckets))
        self.register_buffer("weights", torch.zeros(buckets, outputs))
        self.register_buffer("bias", torch.zeros(outputs))

    @property
    def model(self) -> Words:
        """The same as arrays, without a copy where they are fp32 on the CPU."""
        return Words(*(t.detach().float().cpu().numpy() for t in (self.idf, self.weights, self.bias)))

    def fill(self, words: Words) -> None:
        """Take over a fitted model."""
        for name in ("idf", "weights", "bias"):
            getattr(self, name).copy_(torch.from_numpy(getattr(words, name)))

    def forward(self, ids_BN: Tensor, mask_BN: Tensor | None, segments_BN: Tensor | None) -> Tensor:
        """What the words of each sample say. -> (B, C)."""
        mask = np.ones(ids_BN.shape, bool) if mask_BN is None else mask_BN.cpu().numpy()
        offsets = np.concatenate([[0], np.cumsum(mask.sum(axis=1))])
        pair_start = np.zeros(len(mask), np.int32)
        if segments_BN is not None:
            second = (segments_BN.cpu().numpy() == 1) & mask
            pair_start = np.where(second.any(axis=1), (mask & (np.cumsum(second, axis=1) == 0)).sum(axis=1), 0)
        table = _Tokens(ids_BN.cpu().numpy()[mask].astype(np.int32), offsets, pair_start.astype(np.int32))
        return torch.from_numpy(self.model.logits(table)).to(ids_BN.device)


class ExitHead(nn.Module):
    """An answer from the first token's state and the mean of all, after some layer."""

    def __init__(self, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * width)
        self.inner = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(width, outputs)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, hidden_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        return self.classify(first_token(hidden_BND, mask_BN).float(), pool(hidden_BND, mask_BN))

    def classify(self, first_BD: Tensor, mean_BD: Tensor) -> Tensor:
        """The answer from both. -> (B, C)."""
        normed = self.norm(torch.cat([first_BD, mean_BD], dim=1))
        out: Tensor = self.outer(self.dropout(torch.nn.functional.gelu(self.inner(normed))))
        return out


class _Tokens(NamedTuple):
    tokens: Any
    offsets: Any
    pair_start: Any


@dataclass
class _Rows:
    """The samples that go on, and where in the batch they are."""

    place: Tensor  # (b,)
    budgets: Budgets
    ids: Tensor
    segments: Tensor | None
    words: Tensor | None = None  # logits of the stage of words
    hidden: Tensor | None = None
    tensors: tuple[str, ...] = field(default=("place", "ids", "segments", "words", "hidden"), repr=False)

    def keep(self, stay: Tensor) -> None:
        """Go on with these alone, without the columns that are padding for all of them."""
        for name in self.tensors:
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[stay])
        if self.budgets.mask is not None and len(stay):
            mask = self.budgets.mask[stay]
            columns = int(mask.any(dim=0).nonzero().max()) + 1
            self.budgets = self.budgets.with_mask(padding_mask(mask[:, :columns]))
            for name in ("ids", "segments", "hidden"):
                value = getattr(self, name)
                setattr(self, name, None if value is None else value[:, :columns])


class Stages(nn.Module):
    """The words and exits of a model; without any, its layers from the first to the last."""

    def __init__(self, config: BudgetFormerConfig) -> None:
        super().__init__()
        self.config = config
        options = config.stages.options
        dropout = 0.1 if config.dropout is None else config.dropout
        self.words = WordsStage(1 << options.word_bits, config.labels) if options.words else None
        self.heads = nn.ModuleList(ExitHead(config.hidden_size, config.labels, dropout) for _ in options.layers or ())

    def forward(
        self,
        layers: Layers,
        ids_BN: Tensor,
        segments_BN: Tensor | None,
        words_segments_BN: Tensor | None,
        budgets: Budgets,
        *,
        words_logits: Tensor | None = None,
        limit: float = 0.0,
        after: AfterStage | None = None,
        states: bool = False,
    ) -> Staged:
        """Run a batch; `limit` and `after` let samples leave (evaluation only), `words_logits`: the words' if known.

        In training the layers learn without the words: with them they would leave to the words what those know.
        """
        exits, B, device = self.config.stages, len(ids_BN), ids_BN.device
        rows = _Rows(torch.arange(B, device=device), budgets, ids_BN, segments_BN)
        result, early = _Result(B, self.config, device), (limit, after)
        stage = int(exits.words)
        if self.words is not None and not self.training:
            answer = self.words(ids_BN, budgets.mask, words_segments_BN) if words_logits is None else words_logits
            rows.words = answer = answer.float()
            self._leave(exits, 0, rows, answer, *early, result)
        for layer in range(self.config.num_hidden_layers):
            if not len(rows.place):
                break
            hidden = layers.embed(rows.ids, rows.segments) if rows.hidden is None else rows.hidden
            rows.hidden = hidden = layers.run_layer(layer, hidden, rows.budgets)
            allocation = rows.budgets.allocations[layer]._replace(groups=rows.budgets.groups.get(layer))
            result.allocations.append(_spread(allocation, rows.place, B))
            if states:
                result.states.append(hidden)
            if layer + 1 == exits.depths[stage] and stage < len(exits.depths) - 1:
                logits = self.heads[stage - exits.words](hidden, rows.budgets.mask)
                self._leave(exits, stage, rows, exits.add_words(stage, logits, rows.words), *early, result)
                stage += 1
        if len(rows.place):
            assert rows.hidden is not None
            last = layers.classify(rows.hidden, rows.budgets.mask)
            result.put(rows.place, exits.add_words(stage, last, rows.words), stage)
        return result.staged(budgets)

    def _leave(
        self, exits: Exits, stage: int, rows: _Rows, logits: Tensor, limit: float, after: AfterStage | None,
        result: _Result,
    ) -> None:  # fmt: skip
        """Record a stage's answers and let samples go."""
        result.put(rows.place, logits, stage)
        if (limit or after) and not self.training:
            answers = logits.detach().float().cpu().numpy()
            leaves = exits.leaves(stage, answers, limit)
            if after is not None:
                leaves = after(StageResult(stage, rows.place.cpu().numpy(), answers, result.heads(rows.place), leaves))
            if leaves.any():
                result.complete = False
                rows.keep(torch.from_numpy(np.flatnonzero(~leaves)).to(logits.device))

    def losses(self, stage_logits: Tensor, labels: Tensor, progress: float, **options: Any) -> dict[str, Tensor]:
        """Half the task's loss and half the distance to the last stage's answers, deeper exits weighing more."""
        exits, task = self.config.stages, self.config.task
        if not len(self.heads):
            return {}
        last, parts = stage_logits[:, -1].detach(), []
        for depth, logits in zip(
            exits.options.layers or (), stage_logits.unbind(1)[-len(self.heads) - 1 :], strict=False
        ):
            distance = distillation_loss(logits, last, task, 1.0)
            share = depth / exits.depths[-1]
            parts.append(share * (0.5 * task_loss(logits, labels, task, **options) + 0.5 * distance))
        weight = exits.options.weight if progress >= exits.options.start else 0.0
        return {"exits": weight * torch.stack(parts).sum()}


class _Result:
    """Answers as they come, stage by stage."""

    def __init__(self, batch: int, config: BudgetFormerConfig, device: torch.device) -> None:
        self.config, self.complete = config, True
        self.logits: Tensor | None = None
        self.exits = torch.zeros(batch, dtype=torch.long, device=device)
        self.stages: list[Tensor] = []
        self.states: list[Tensor] = []
        self.allocations: list[Allocation] = []

    def put(self, place: Tensor, logits: Tensor, stage: int) -> None:
        everyone = len(place) == len(self.exits)
        if everyone:
            self.logits = logits
            self.stages.append(logits)
        else:
            assert self.logits is not None
            self.logits = self.logits.to(logits.dtype).index_copy(0, place, logits)
        self.exits = torch.full_like(self.exits, stage) if everyone else self.exits.index_fill(0, place, stage)

    def heads(self, place: Tensor) -> NDArray[np.int16]:
        """Those that ran for some samples in the layers so far. -> (b, l)."""
        counts = [allocation.active[place].sum(-1).cpu().numpy() for allocation in self.allocations]
        return np.stack(counts, axis=1).astype(np.int16) if counts else np.zeros((len(place), 0), np.int16)

    def staged(self, budgets: Budgets) -> Staged:
        B, config, device = len(self.exits), self.config, self.exits.device
        while len(self.allocations) < config.num_hidden_layers:  # layers that no sample reached
            none_BH = torch.zeros(B, config.num_attention_heads, device=device)
            zero_B = none_BH[:, 0]
            groups = torch.zeros(B, config.groups, device=device) if config.groups else None
            self.allocations.append(Allocation(zero_B, none_BH, zero_B.long(), none_BH.bool(), none_BH, groups))
        assert self.logits is not None
        several = self.complete and len(self.stages) > 1
        stages = torch.stack([logits.float() for logits in self.stages], dim=1) if several else None
        return Staged(self.logits, self.exits, stages, self.states, tuple(self.allocations))


def _spread(allocation: Allocation, place: Tensor, batch: int) -> Allocation:
    """An allocation of some samples, in their places in the batch; zero for the others."""
    if len(place) == batch:
        return allocation
    parts = [None if t is None else t.new_zeros(batch, *t.shape[1:]).index_copy(0, place, t) for t in allocation]
    return Allocation(*parts)  # type: ignore[arg-type]
