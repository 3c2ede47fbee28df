"""The published figures are what their commands print from the published results."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tests.models.tiny import save_base
from tests.training.toy import write_reviews

ROOT = Path(__file__).parents[1]


def test_the_tables_of_the_retrofit_page_are_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "docs" / "results" / "retrofit", tmp_path / "results")
    runpy.run_path(str(ROOT / "benchmarks" / "retrofit.py"))["plot"](Namespace(results=tmp_path / "results"))
    names = ("| data set |", "| ag_news |", "| imdb |", "| snli |")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(names)]
    assert len(rows) > 20
    page = (ROOT / "docs" / "retrofit.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith(names)] == rows
    drawn, published = tmp_path / "results" / "curve.svg", ROOT / "docs" / "results" / "retrofit" / "curve.svg"
    assert drawn.read_text(encoding="utf-8") == published.read_text(encoding="utf-8")


def test_the_table_of_the_stages_page_is_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    shutil.copytree(ROOT / "docs" / "results" / "stages", tmp_path / "results")
    runpy.run_path(str(ROOT / "benchmarks" / "stages.py"))["plot"](Namespace(results=tmp_path / "results"))
    rows = [line for line in capsys.readouterr().out.splitlines() if "| minilm |" in line]
    assert len(rows) > 20
    page = (ROOT / "docs" / "stages.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if "| minilm |" in line] == rows
    drawn, published = tmp_path / "results" / "curve.svg", ROOT / "docs" / "results" / "stages" / "curve.svg"
    assert drawn.read_text(encoding="utf-8") == published.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda file: file.stem)
def test_a_benchmark_names_what_is_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    runpy.run_path(str(file), run_name="imported")


def test_the_retrofit_benchmark_runs_every_kind_of_method_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "imdb").mkdir(parents=True)
    for seed, split in enumerate(("train", "test")):
        write_reviews(tmp_path / "data" / "imdb" / f"{split}.csv", rows=80, seed=seed)
    folders = ["--results", tmp_path / "results", "--runs", tmp_path / "runs", "--data-dir", tmp_path / "data"]
    methods = ["start", "budgeted", "random", "michel", "untrained", "frozen", "tfidf"]
    few = ["--datasets", "imdb", "--shares", "0.25", "0.5"]

    def benchmark(*words: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["retrofit.py", *map(str, words)])
        runpy.run_path(str(ROOT / "benchmarks" / "retrofit.py"), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    base = save_base(tmp_path / "base", max_position_embeddings=256)
    short = ["--rows", "60", "--seeds", "0", "--epochs", "1", "--methods", *methods]
    run = ["run", "--base", base, *folders, *few, *short]
    written = [str(tmp_path / "results" / f"imdb-{method}-0.json") for method in methods]
    assert benchmark(*run) == written
    assert benchmark(*run) == []  # what is there is not done again
    result = {m: json.loads(Path(file).read_text())["points"] for m, file in zip(methods, written, strict=True)}
    (start,), (floor,) = result.pop("start"), result.pop("tfidf")
    assert (start["rows"], start["k_over_h"]) == (80, 1.0)
    assert floor["value"] > 0.9  # a word decides
    for method, points in result.items():
        assert [p["dial"].partition(":")[2] for p in points[:2]] == ["0.25", "0.5"]
        assert [p["k_over_h"] for p in points[:2]] == pytest.approx([0.25, 0.5], abs=0.1 if method == "budgeted" else 0)
        for p in points:
            assert p["versus_start"]["value"] == pytest.approx(p["value"] - start["value"])
    assert len(benchmark("time", *folders, *few, "--batches", "2", "--seconds", "0")) == 2  # model and attention
    timed = json.loads((tmp_path / "results" / "time-imdb.json").read_text())["rows"]
    assert set(timed[0]["speedup"]) == {"mean:0.25", "mean:0.5", "frozen:0.25", "frozen:0.5"}
    rows = [line for line in benchmark("plot", *folders[:2]) if line.startswith("| imdb")]
    assert len(rows) == len([p for points in result.values() for p in points]) + 2 + len(timed)
