"""The finished cells of the medium scale that the project ships are cells of that scale as it is now."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from budgetformer_reproduction.controls import controls
from budgetformer_reproduction.render import read
from budgetformer_reproduction.reproduce import EXPERIMENTS, make_plan, needed, tabulate
from budgetformer_reproduction.store import Store

ROOT = Path(__file__).parents[2]
PACKED = sorted((ROOT / "reproduction" / "cells" / "medium").glob("*.zip"))


@pytest.mark.parametrize("file", PACKED, ids=lambda file: file.stem)
def test_packed_cells_count_as_done(file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path)
    plan = make_plan("medium", tmp_path, seeds=3)
    controls(plan, store := Store(plan))  # they ask for more cells once they have seen the first ones
    known, names = needed(plan, list(EXPERIMENTS)) | store.asked, [f.name for f in (tmp_path / "cells").iterdir()]
    assert names
    for name in names:
        assert plan.done(known[name]), name
        (done,) = store.get([known[name]])
        assert done.cell.dataset == file.stem
        assert 0.3 < done.accuracy <= 1


def test_the_published_results_are_those_of_the_packed_cells(tmp_path: Path) -> None:
    for file in PACKED:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(tmp_path)
    published = {result.id: result for result in read(ROOT / "docs")}
    without = {"attention-maps", "complexity"}  # they need weights, and SNLI's annotators, which are not packed
    names = [name for name in EXPERIMENTS if name not in without]
    results, _ = tabulate(make_plan("medium", tmp_path, seeds=3), names)
    shown = {name: result for name, result in results.items() if result.tables or result.claims}
    assert {*shown, *without} == set(published)
    for name, result in shown.items():
        assert same(result.to_json(), published[name].to_json(), but="provenance"), name
        assert result.provenance.cells == published[name].provenance.cells


def same(made: str, expected: str, but: str) -> bool:
    """Whether two results are equal but for a field and the last bits of numbers."""

    def number(digits: str) -> float:
        return round(float(f"{float(digits):.9g}"), 9)

    one, other = (json.loads(text, parse_float=number) | {but: None} for text in (made, expected))
    return bool(one == other)
