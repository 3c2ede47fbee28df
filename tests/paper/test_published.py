"""The paper's own count, against its printed cells and a cell worked out by hand."""

from __future__ import annotations

import pytest

from budgetformer.cost.flops import Shape, papers_count
from budgetformer_reproduction.published import main_table_costs, summary


def test_all_twenty_cells_match_what_was_printed() -> None:
    cells = main_table_costs()
    assert len(cells) == 20
    assert [c for c in cells if not c["matches"]] == []


def test_a_cell_by_hand() -> None:
    small = Shape(layers=2, heads=2, width=4)
    # One layer, N = 3: 4 * 3 * 16 = 192; 2 * 9 * 4 + 2 * 9 = 90; gates 16 + 4 + 8 = 28.
    assert papers_count(3, shape=small) == 2 * (192 + 90)
    assert papers_count(3, 0.5, gated=True, shape=small) == 2 * (192 + 45 + 28)


def test_a_wrong_value_does_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("budgetformer_reproduction.published.FLOPS_PER_GRAM", 3.1e14)
    by_quantity = {q: [c["matches"] for c in main_table_costs() if c["quantity"] == q] for q in ("flops", "carbon_g")}
    assert all(by_quantity["flops"])
    assert not any(by_quantity["carbon_g"])


def test_sizes_are_the_printed_mebibytes() -> None:
    sizes = summary()["sizes_mib"]
    assert round(sizes["transformer"], 2) == 197.58
    assert round(sizes["budgetformer"], 2) == 206.70
