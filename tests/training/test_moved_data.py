"""A run goes on where its data lies elsewhere, and not where its data is another."""

from __future__ import annotations

from pathlib import Path

import pytest

from budgetformer.data.locate import DataSource
from budgetformer.errors import BudgetFormerError
from budgetformer.training.recipe import Recipe
from budgetformer.training.run import train_run


def write(path: Path, start: int, count: int) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("text,label\n" + "".join(f"row {i},{'ab'[i % 2]}\n" for i in range(start, start + count)))
    return str(path)


def test_any_of_its_files_may_have_moved_but_not_changed(tmp_path: Path) -> None:
    recipe = Recipe.make(preset="tiny", epochs=1, vocab_size=100)
    train_file, test = write(tmp_path / "train.csv", 0, 40), write(tmp_path / "test.csv", 100, 10)
    begun = DataSource(train_file, validation=write(tmp_path / "validation.csv", 200, 10), test=test)
    result = train_run(begun, recipe, tmp_path / "run", quiet=True)
    moved = [write(tmp_path / "there" / f"{start}.csv", start, rows) for start, rows in ((0, 40), (200, 10), (100, 10))]
    elsewhere = DataSource(moved[0], validation=moved[1], test=moved[2])
    assert train_run(elsewhere, recipe, tmp_path / "run", resume=True, quiet=True) == result
    other = write(tmp_path / "other.csv", 300, 10)
    for change in (other, "test"):
        with pytest.raises(BudgetFormerError, match="cannot resume"):
            train_run(
                DataSource(train_file, validation=change, test=test), recipe, tmp_path / "run", resume=True, quiet=True
            )
