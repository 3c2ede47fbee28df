"""budgetformer.train: the command line's train from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import budgetformer
from budgetformer.errors import UsageError


def test_it_trains_what_the_command_line_trains(tiny_run: Path, reviews: Path, tmp_path: Path) -> None:
    run = budgetformer.train(
        reviews,
        output=tmp_path / "run",
        preset="tiny",
        text="review",
        epochs=6,
        vocab_size=200,
        max_length=32,
        quiet=True,
        model={"exits": None},
    )
    a, b = (load_file(folder / "model.safetensors") for folder in (tiny_run, run.folder))
    assert [name for name in a if not a[name].equal(b[name])] == []
    assert run.predict(["a superb story of town", "the dull film of people"]).labels == ["pos", "neg"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epoch": 3}, "option 'epoch' is not known: did you mean 'epochs'"),
        ({"labels": "x"}, "option 'labels' is not known: did you mean 'label'"),
        ({"speed": 9}, "option 'speed' is not known: known: .*max_length.*text"),
        ({"epochs": 0}, "epochs=0: give a whole number"),
        ({"preset": "huge"}, "preset 'huge' is not known"),
        ({"preset": "tiny", "base": "x"}, "the preset base is for --base, and only it"),
        ({"task": "several"}, "several"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str, reviews: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        budgetformer.train(reviews, output=tmp_path / "run", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
