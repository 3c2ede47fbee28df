"""The examples run as they stand, and stay short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

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
        pytest.skip("wants a model and data of the reader's own")
    runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out
    assert [line for line in SAYS[example.name] if line not in out] == [], out
