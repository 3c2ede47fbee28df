from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budgetformer.errors import DataError, UsageError
from budgetformer.training.loop import Fit
from budgetformer_reproduction import grid
from budgetformer_reproduction.cells import Cell, Plan
from budgetformer_reproduction.grid import GridError, run_grid
from budgetformer_reproduction.reproduce import make_plan, needed, run
from budgetformer_reproduction.scale import SCALES
from budgetformer_reproduction.store import Store
from tests.paper.made import make_data, smoke_plan


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_data(tmp_path_factory.mktemp("data")))


@pytest.fixture
def plan(data: str, tmp_path: Path) -> Plan:
    return smoke_plan(tmp_path / "out", data, "snli,imdb")


def test_cells_are_shared_by_name() -> None:
    plan = make_plan("cpu", Path("out"), 2)
    store = Store(plan, read=False)
    assert store.get([*plan.learned("snli"), *plan.learned("snli", 1.0), *plan.dense("snli")]) == []
    assert list(store.asked) == ["snli-learned-s0", "snli-learned-s1", "snli-dense-s0", "snli-dense-s1"]
    with pytest.raises(AssertionError, match="two cells are named snli-x-s0"):
        store.get([Cell("snli", "x", 0), Cell("snli", "x", 0, {"entropy": "off"})])


def test_the_papers_own_shape_is_the_ordinary_cell() -> None:
    paper = needed(make_plan("paper", Path("out")), ["model-scale"])
    assert {"snli-learned-s0", "snli-dense-s0", "snli-dense-4L-12H-s0"} <= paper.keys()
    assert "snli-learned-4L-8H-s0" not in paper
    assert "snli-learned-4L-8H-s0" in needed(make_plan("cpu", Path("out")), ["model-scale"])


def test_sizes_are_trained_on_the_scales_share_of_the_rows() -> None:
    plan = make_plan("medium", Path("out"))
    cells = needed(plan, ["model-scale"])
    assert list(cells) == [f"snli-learned-{shape}-25pct-s0" for shape in ("4L-8H", "4L-12H", "6L-12H", "12L-12H")]
    assert {plan.source(cell.dataset, cell.fraction).limit for cell in cells.values()} == {19_222}


def test_longest_first_and_done_ones_are_skipped(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    monkeypatch.setattr(grid, "compute", lambda plan, cell: computed.append(cell.name))
    monkeypatch.setattr(Plan, "done", lambda self, cell: cell.name in ("snli-dense-s0", *computed))
    cells = [*plan.learned("snli", 0.1), *plan.learned("snli"), *plan.dense("snli"), *plan.learned("snli", 0.5)]
    assert run_grid(plan, cells) == []
    assert computed == ["snli-learned-s0", "snli-learned-50pct-s0", "snli-learned-10pct-s0"]
    assert run_grid(plan, cells) == []
    assert len(computed) == 3


def test_a_killed_grid_goes_on_to_the_same_result(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = plan.learned("imdb")
    uninterrupted = replace(plan, folder=tmp_path / "uninterrupted")
    assert run_grid(uninterrupted, cells) == []
    step = Fit._step

    def killed(self: Fit, rows: Any) -> Any:
        if self.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Fit, "_step", killed)
        with pytest.raises(KeyboardInterrupt):
            run_grid(plan, cells)
    assert not plan.done(cells[0])
    assert run_grid(plan, cells) == []
    resumed, straight = (Store(p).get(cells)[0] for p in (plan, uninterrupted))
    for key, values in resumed.rows.items():
        np.testing.assert_array_equal(values, straight.rows[key])
    assert resumed.probes == straight.probes
    assert "1/1 cells: imdb-learned-s0 done" in capsys.readouterr().err


def test_a_failed_cell_is_named_and_the_others_go_on(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []

    def compute(plan: Plan, cell: Cell) -> None:
        if cell.dataset == "snli":
            raise DataError("row 3: no label")
        computed.append(cell.name)

    monkeypatch.setattr(grid, "compute", compute)
    with pytest.raises(
        GridError, match=r"2 cells are missing .*snli-(dense|learned)-s0 \(row 3: no label; log: "
    ) as error:
        run(plan, ["sizes"])
    assert error.value.exit_code == 3
    assert computed == ["imdb-dense-s0", "imdb-learned-s0"]
    assert "row 3: no label" in (plan.folder / "logs" / "snli-dense-s0.log").read_text()
    assert (plan.folder / "results" / "sizes.json").exists()  # of the paper's models
    with pytest.raises(GridError, match="cells are missing"):  # and none of them has a result
        run(replace(plan, folder=plan.folder.with_name("no results")), ["ablation"])


def test_processes_of_their_own_end_with_the_grid_and_go_on(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = plan.dense("imdb"), plan.each("imdb", "wrong", {"gates": {"kind": "nothing"}})
    started: list[subprocess.Popen[bytes]] = []
    start = grid._start
    monkeypatch.setattr(grid, "_start", lambda *arguments: started.append(start(*arguments)) or started[-1])

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(grid.time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_grid(plan, [*good, *bad], jobs=2)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)
    failures = run_grid(plan, [*good, *bad], jobs=2)
    assert [f.cell.name for f in failures] == ["imdb-wrong-s0"]
    assert failures[0].exit_code == 2
    assert "gates.kind='nothing'" in failures[0].reason
    assert plan.done(good[0])


def test_two_grids_do_not_share_a_folder(plan: Plan) -> None:
    plan.folder.mkdir()
    with (plan.folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process is computing in"):
            run_grid(plan, plan.dense("imdb"))


def test_a_cell_of_another_scale_is_not_taken_for_done(plan: Plan) -> None:
    assert run_grid(plan, plan.dense("imdb")) == []
    other = replace(plan, scale=replace(SCALES["smoke"], recipe={**SCALES["smoke"].recipe, "learning_rate": 1e-4}))
    with pytest.raises(UsageError, match="imdb-dense-s0 was trained with other settings"):
        run_grid(other, other.dense("imdb"))
