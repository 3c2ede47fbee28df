"""Files of a folder on a local Ray: the same rows as without it."""

from __future__ import annotations

import lzma
import re
import sys
from pathlib import Path

import pytest

from tests.cli.test_train import command
from tests.predict.test_predict import ROWS, read, write
from tests.predict.toy import EXITS, make_run


def test_without_ray_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    write(tmp_path / "a.jsonl", ROWS)
    assert command("predict", "run", str(tmp_path), "-o", str(tmp_path / "out"), "--workers", "0") == 5
    assert "pip install '.[ray]'" in capsys.readouterr().err


def test_two_files_do_not_share_an_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, run = tmp_path / "in", make_run(tmp_path / "run")
    folder.mkdir()
    write(folder / "a.csv", ROWS[:3])
    with lzma.open(folder / "a.csv.xz", "wt", encoding="utf-8") as file:
        file.write((folder / "a.csv").read_text(encoding="utf-8"))
    assert command("predict", str(run), str(folder), "-o", str(tmp_path / "out"), "--workers", "0") == 2
    assert "holds a.csv with .xz and without" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ray_gives_the_rows_of_the_local_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    run = make_run(tmp_path / "run", exits=EXITS)
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    write(folder / "a.parquet", ROWS[:30])
    write(folder / "b.jsonl", ROWS[30:])
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        assert command("predict", str(run), str(folder), "-o", str(out), "--workers", "0") == 0
        together = capsys.readouterr().err
        assert command("predict", str(run), str(folder), "-o", str(tmp_path / "all.jsonl")) == 0
        exits = re.search("50 rows.* % of the dense FLOPs, % left at layer 1 / layer 2: [0-9/]+", together)
        assert exits
        assert exits[0].rpartition("cut, ")[2] in capsys.readouterr().err
        rows = read(out / "a.parquet") + read(out / "b.jsonl")
        expected = read(tmp_path / "all.jsonl")  # in other batches, so on some processors with another last digit
        assert [row.pop("score") for row in rows] == pytest.approx([row.pop("score") for row in expected], abs=2e-6)
        assert rows == expected
        assert command("predict", str(run), str(folder), "-o", str(out), "--workers", "0") == 2
        assert "exists: give another -o" in capsys.readouterr().err
    finally:
        ray.shutdown()
