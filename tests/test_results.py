"""The published figures are what their commands print from the published results."""

from __future__ import annotations

import runpy
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_tables_of_the_retrofit_page_are_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "docs" / "results" / "retrofit", tmp_path / "results")
    runpy.run_path(str(ROOT / "benchmarks" / "retrofit.py"))["plot"](Namespace(results=tmp_path / "results"))
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    page = (ROOT / "docs" / "retrofit.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if row not in page] == []
    drawn, published = tmp_path / "results" / "curve.svg", ROOT / "docs" / "results" / "retrofit" / "curve.svg"
    assert drawn.read_text(encoding="utf-8") == published.read_text(encoding="utf-8")
