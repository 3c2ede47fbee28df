"""The paper's own count of FLOPs, carbon and size, recovered from its tables, and the cells it printed.

Here a "FLOP" is one multiply-accumulate; only attention is counted, the projections in full, and the predicted s
rather than the executed k. Everywhere else in this package a FLOP is two per multiply-accumulate.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

FLOPS_PER_GRAM = 3e14
_MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """The sizes that the counts depend on; the defaults are the paper's."""

    layers: int = 4
    heads: int = 8
    width: int = 768
    inner: int = 3072
    vocab: int = 30522


def attention_flops(tokens: int, budget: float = 1.0, *, gated: bool = False, shape: Shape | None = None) -> float:
    """The paper's count for one text of `tokens` (padded) positions at mean budget s.

    L (4 N D^2 + s (2 N^2 D + H N^2)), plus L (D^2 + D + D H) for the gates.
    """
    m = shape or Shape()
    projections = 4 * tokens * m.width**2
    quadratic = budget * (2 * tokens**2 * m.width + m.heads * tokens**2)
    gates = m.width**2 + m.width + m.width * m.heads if gated else 0
    return m.layers * (projections + quadratic + gates)


def carbon_grams(flops: float) -> float:
    """The paper's conversion: grams of CO2 in proportion to FLOPs, whatever the machine."""
    return flops / FLOPS_PER_GRAM


def parameters(labels: int, *, gated: bool, shape: Shape | None = None) -> int:
    """The number of parameters of the paper's model (gated) or of its standard Transformer."""
    m = shape or Shape()
    attention = 4 * (m.width**2 + m.width)
    feedforward = 2 * m.width * m.inner + m.inner + m.width
    norms = 2 * 2 * m.width
    gates = m.width**2 + m.width + m.width + 1 + m.width * m.heads + m.heads if gated else 0
    layer = attention + feedforward + norms + gates
    return m.vocab * m.width + m.layers * layer + labels * (m.width + 1)


@dataclass(frozen=True)
class PublishedRow:
    """One data set's row in the paper's main table."""

    dataset: str
    tokens: int
    test_rows: int
    budget: float  # s_mean, printed to three digits
    accuracy: tuple[float, float]  # Transformer, BudgetFormer
    flops: tuple[float, float]
    carbon: tuple[float, float]


MAIN_TABLE = (
    PublishedRow("dbpedia_14", 64, 70_000, 0.085, (0.9830, 0.9859), (4.40e13, 4.26e13), (0.1468, 0.1420)),
    PublishedRow("ag_news", 64, 7_600, 0.212, (0.9099, 0.9022), (4.78e12, 4.65e12), (0.0159, 0.0155)),
    PublishedRow("imdb", 512, 25_000, 0.601, (0.8354, 0.8356), (1.61e14, 1.45e14), (0.5376, 0.4840)),
    PublishedRow("snli", 64, 9_824, 0.364, (0.7835, 0.8106), (6.18e12, 6.05e12), (0.0206, 0.0202)),
    PublishedRow("yelp_review_full", 512, 50_000, 0.198, (0.5810, 0.6190), (3.23e14, 2.58e14), (1.0751, 0.8591)),
)
PUBLISHED_MIB = {"transformer": 197.58, "budgetformer": 206.70}


@dataclass(frozen=True)
class Cell:
    """A computed value beside the published one."""

    dataset: str
    model: str
    quantity: str
    computed: float
    published: float
    matches: bool


def _rounded(value: float, quantity: str) -> float:
    """As the paper prints it: FLOPs with three significant digits, carbon with four decimals."""
    if quantity == "carbon_g":
        return round(value, 4)
    exponent = math.floor(math.log10(value))
    return round(value, 2 - exponent)


def _cell(row: PublishedRow, gated: bool, quantity: str) -> Cell:
    def value(budget: float) -> float:
        flops = row.test_rows * attention_flops(row.tokens, budget, gated=gated)
        return flops if quantity == "flops" else carbon_grams(flops)

    published = (row.flops if quantity == "flops" else row.carbon)[gated]
    half_digit = 0.0005 if gated else 0.0  # s_mean is itself printed to three digits
    s = row.budget if gated else 1.0
    low, high = (_rounded(value(s + sign * half_digit), quantity) for sign in (-1, 1))
    slack = 1e-9 * published
    return Cell(
        dataset=row.dataset,
        model="budgetformer" if gated else "transformer",
        quantity=quantity,
        computed=value(s),
        published=published,
        matches=low - slack <= published <= high + slack,
    )


def main_table_costs() -> list[Cell]:
    """All twenty FLOPs and carbon cells of the paper's main table, recomputed."""
    return [
        _cell(row, gated, quantity)
        for row in MAIN_TABLE
        for quantity in ("flops", "carbon_g")
        for gated in (False, True)
    ]


def summary() -> dict[str, Any]:
    """Model sizes in MiB (fp32, three labels) and the main table's cells, as JSON-ready data."""
    sizes = {
        "transformer": parameters(3, gated=False) * 4 / _MIB,
        "budgetformer": parameters(3, gated=True) * 4 / _MIB,
    }
    return {"sizes_mib": sizes, "cells": [asdict(cell) for cell in main_table_costs()]}
