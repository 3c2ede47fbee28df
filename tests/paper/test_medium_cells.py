"""The finished cells of the medium scale that the project ships are cells of that scale as it is now."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from budgetformer_reproduction.controls import controls
from budgetformer_reproduction.reproduce import EXPERIMENTS, make_plan, needed
from budgetformer_reproduction.store import Store

PACKED = sorted((Path(__file__).parents[2] / "reproduction" / "cells" / "medium").glob("*.zip"))


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
