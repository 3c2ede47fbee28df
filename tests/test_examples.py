"""The examples run as they stand, and stay short."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

import budgetformer
import budgetformer.nn
from budgetformer.serving.service import Engine
from budgetformer.serving.settings import Settings
from tests.models.tiny import save_base
from tests.training.toy import write_reviews

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SAYS = {
    "custom_allocator.py": ["6 tokens: 1 of 8 heads", "64 tokens: 8 of 8 heads"],
    "sklearn_pipeline.py": ["accuracy in three folds: [1. ", "learned: 1.00", "full: 1.00"],
    "train_and_predict.py": ["accuracy 1.00 on 20 rows", "'a superb story': good", "'the music was awful': bad"],
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = example.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 40
    if "sys.argv" in source:
        return  # wants a model and data: below
    runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out
    assert [line for line in SAYS[example.name] if line not in out] == [], out


def test_examples_use_public_names_alone() -> None:
    public = {"budgetformer": set(budgetformer.__all__), "budgetformer.nn": set(budgetformer.nn.__all__)}
    for example in EXAMPLES:
        for node in ast.walk(ast.parse(example.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("budgetformer"):
                assert {alias.name for alias in node.names} <= public[str(node.module)], example
            elif isinstance(node, ast.Import):
                assert [a.name for a in node.names if a.name.startswith("budgetformer.")] == [], example


def test_an_encoder_is_retrofitted_calibrated_and_can_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_base(tmp_path / "base", max_position_embeddings=128)
    reviews = write_reviews(tmp_path / "r.csv", rows=80)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["retrofit.py", str(base), str(reviews)])
    example = next(path for path in EXAMPLES if path.name == "retrofit.py")
    assert len(example.read_text(encoding="utf-8").splitlines()) < 30
    runpy.run_path(str(example), run_name="__main__")
    cost = int(re.search(r"answered after .* at (\d+)% of the cost", capsys.readouterr().out)[1])  # type: ignore[index]
    engine = Engine(Settings(tmp_path / "runs/retrofit", budget="0.3"))
    (answer,) = engine.answers(engine.score(engine.encode([("a superb story", None)]), engine.budget))
    assert round(100 * answer["cost"]) == cost
