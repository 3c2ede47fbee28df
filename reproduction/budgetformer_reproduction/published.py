"""The paper's own count of FLOPs, carbon and size, recovered from its tables, and the cells it printed.

Here a "FLOP" is one multiply-accumulate; only attention is counted, the projections in full, and the predicted s
rather than the executed k. Everywhere else in this package a FLOP is two per multiply-accumulate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from budgetformer.cost.flops import Shape, papers_count

FLOPS_PER_GRAM = 3e14
_PRINTED = Shape()
_PRINTED_AS = {"flops": ".2e", "carbon_g": ".4f"}


def carbon_grams(flops: float) -> float:
    """The paper's conversion: grams of CO2 in proportion to FLOPs, whatever the machine."""
    return flops / FLOPS_PER_GRAM


def parameters(labels: int, *, gated: bool, shape: Shape = _PRINTED) -> int:
    """The number of parameters of the paper's model (gated) or of its standard Transformer."""
    attention = 4 * (shape.width**2 + shape.width)
    feedforward = 2 * shape.width * shape.inner + shape.inner + shape.width
    norms = 2 * 2 * shape.width
    gates = shape.width**2 + shape.width + shape.width + 1 + shape.width * shape.heads + shape.heads if gated else 0
    layer = attention + feedforward + norms + gates
    return shape.vocab * shape.width + shape.layers * layer + labels * (shape.width + 1)


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


def _cell(row: PublishedRow, gated: bool, quantity: str) -> dict[str, Any]:
    """A computed value beside the published one, which it matches if it rounds to the printed digits."""

    def value(budget: float) -> float:
        flops = row.test_rows * papers_count(row.tokens, budget, gated=gated)
        return flops if quantity == "flops" else carbon_grams(flops)

    def printed(budget: float) -> float:
        return float(f"{value(budget):{_PRINTED_AS[quantity]}}")

    s, half_digit = (row.budget, 0.0005) if gated else (1.0, 0.0)  # s_mean is itself printed to three digits
    published = (row.flops if quantity == "flops" else row.carbon)[gated]
    return {
        "dataset": row.dataset,
        "model": "budgetformer" if gated else "transformer",
        "quantity": quantity,
        "computed": value(s),
        "published": published,
        "matches": printed(s - half_digit) <= published <= printed(s + half_digit),
    }


def main_table_costs() -> list[dict[str, Any]]:
    """All twenty FLOPs and carbon cells of the paper's main table, recomputed."""
    return [_cell(row, gated, quantity) for row in MAIN_TABLE for quantity in _PRINTED_AS for gated in (False, True)]


def summary() -> dict[str, Any]:
    """Model sizes in MiB (fp32, three labels) and the main table's cells, as JSON-ready data."""
    models = {"transformer": False, "budgetformer": True}
    sizes = {name: parameters(3, gated=gated) * 4 / 2**20 for name, gated in models.items()}
    return {"sizes_mib": sizes, "cells": main_table_costs()}
