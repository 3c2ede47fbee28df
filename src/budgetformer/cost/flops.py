"""FLOPs in closed form, part by part. A FLOP is two per multiply-accumulate; look-ups and elementwise work count 0.

Three ways of running the same text: `dense` (every head, no gates), `paper` (gates and full projections, only the
executed heads attend) and `selective` (a head that is not executed needs no projection either). Of the feed-forward
layers only the executed groups of neurons are computed, in the last two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Number = Any  # a number, or an array of one for each text
Execution = Literal["dense", "paper", "selective"]


@dataclass(frozen=True)
class Shape:
    """The sizes that counts depend on; the defaults are the paper's. A layer's gate may have two nets."""

    layers: int = 4
    heads: int = 8
    width: int = 768
    inner: int = 3072
    labels: int = 4
    vocab: int = 30522
    budget_net: bool = True  # f, which predicts s
    scorer: bool = True  # g, which ranks the heads
    groups: int = 0  # of feed-forward neurons in a layer that may be left out; 0: none
    words: bool = False  # a linear model over n-grams answers first


@dataclass(frozen=True)
class Flops:
    """The count for one text, by part."""

    gates: Number
    projections: Number
    scores: Number
    feedforward: Number
    classifier: Number
    exits: Number = 0.0  # words, and the heads of exits

    @property
    def attention(self) -> Number:
        """What head budgets can save: projections and scores."""
        return self.projections + self.scores

    @property
    def total(self) -> Number:
        return self.gates + self.projections + self.scores + self.feedforward + self.classifier + self.exits


def count(
    shape: Shape,
    tokens: Number,
    heads: Sequence[Number],
    execution: Execution = "selective",
    *,
    layers: int | None = None,
    exits: int = 0,
    groups: Sequence[Number] | None = None,
) -> Flops:
    """FLOPs of one text of `tokens` real tokens that executes `heads[l]` heads in layer l.

    Of `layers` only so many run (None: all), and `exits` heads of exits are evaluated on the way. `groups[l]` groups of
    layer l's feed-forward neurons are executed (None: all, in the layers that run). All parts are linear in the number
    of heads, so a mean number is as good as a whole one at a given length. `tokens` and `heads[l]` may be arrays, for
    many texts at once.
    """
    N, D = tokens, shape.width
    depth = shape.layers if layers is None else layers
    executed = depth * shape.heads if execution == "dense" else sum(heads)
    share = executed / shape.heads
    narrowed = depth if groups is None or execution == "dense" else sum(groups) / shape.groups
    gates = 0.0
    if execution != "dense":
        gates += 2 * N * D if shape.budget_net or shape.scorer else 0  # pooling
        gates += 2 * D * D + 2 * D if shape.budget_net else 0
        gates += 2 * D * shape.heads if shape.scorer else 0
        gates += 2 * N * D + 2 * D * shape.groups if shape.scorer and shape.groups else 0  # of the feed-forward groups
    words = 4 * N * shape.labels if shape.words else 0  # a uni- and a bigram per token
    return Flops(
        gates=depth * gates,
        projections=8 * N * D * D * (share if execution == "selective" else depth),
        scores=4 * N * N * D * share,
        feedforward=narrowed * 4 * N * D * shape.inner,
        classifier=2 * N * D + 2 * D * shape.labels if depth == shape.layers else 0.0,
        exits=words + exits * (2 * N * D + 4 * D * D + 2 * D * shape.labels),
    )


_PAPER = Shape()


def papers_count(tokens: Number, budget: Number = 1.0, *, gated: bool = False, shape: Shape = _PAPER) -> Number:
    """The paper's own count for one text of `tokens` (padded) positions at mean budget s: attention alone, the
    projections in full, one FLOP per multiply-accumulate.

    L (4 N D^2 + s (2 N^2 D + H N^2)), plus L (D^2 + D + D H) for the gates.
    """
    projections = 4 * tokens * shape.width**2
    quadratic = budget * (2 * tokens**2 * shape.width + shape.heads * tokens**2)
    gates = shape.width**2 + shape.width + shape.width * shape.heads if gated else 0
    return shape.layers * (projections + quadratic + gates)
