"""budgetformer.train: the command line's train from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import budgetformer
from budgetformer.engine.scores import score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import UsageError
from budgetformer.evaluate import evaluate
from budgetformer.runs.run import Run
from budgetformer.training.record import comparison, dial_point


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


def test_beside_a_learned_budget_that_is_dear_stands_a_cheaper_one(tiny_staged: Path) -> None:
    run = Run.open(tiny_staged)
    engine, table = run.engine(), run.encode(run.held_out())
    assert isinstance(engine, TorchEngine)
    dear, stages = evaluate(engine, table, split="test", dial="exit:0"), score(engine, table, "exit:0")
    entries = {entry.pop("model"): entry for entry in comparison(engine, table, dear, stages)}
    assert list(entries) == ["words", "0.3", "learned", "full"]
    assert entries["0.3"] == dial_point(evaluate(engine, table, split="test", dial="0.3"))  # as it runs
    assert entries["words"]["flops_ratio"] <= entries["0.3"]["flops_ratio"] < entries["learned"]["flops_ratio"]
