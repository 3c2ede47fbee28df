"""Killed at any moment and resumed, the output is byte for byte that of one go; anything that changed is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetformer.data.examples import BadRows, Schema
from budgetformer.data.locate import DataSource
from budgetformer.data.sources import BadRow, RawRow
from budgetformer.errors import ModelError, UsageError
from budgetformer.predict import input as rows
from budgetformer.predict import job, sinks
from budgetformer.predict.job import Predictor, Request
from budgetformer.runs.run import Run
from tests.cli.test_train import command
from tests.predict.test_predict import ROWS, write
from tests.predict.toy import EXITS, make_run

TARGETS = ["o.csv", "o.jsonl", "o.jsonl.gz", "o.parquet"]


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


@pytest.fixture(scope="module")
def one_go(predictor: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of one go."""
    folder = tmp_path_factory.mktemp("one_go")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "WINDOW_ROWS", 8)
        for target in TARGETS:
            predict(predictor, folder, target)
    return folder


def predict(predictor: Predictor, folder: Path, target: str, **options: Any) -> Any:
    data = write(folder / "d.jsonl", [*ROWS[:20], {"id": 0, "text": ""}, *ROWS[20:]])
    source = DataSource(str(data), bad_rows="skip")
    return predictor.predict(Request(source, folder / target, **options), lambda line: None)


def dies(function: Callable[..., Any], at: int, *, after: bool) -> Callable[..., Any]:
    """The function, killed at its n-th call, before or after its work."""
    calls = 0

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not after:
            raise Killed
        result = function(*arguments, **options)
        if calls == at:
            raise Killed
        return result

    return dying


MOMENTS = [
    (job._Job, "_save", 1, False), (job._Job, "_save", 1, True), (job._Job, "_save", 4, False),
    (job._Job, "_save", 4, True), (job._Job, "_save", 9, False), (job._Job, "_save", 9, True),
    (job.Scorer, "run", 1, False), (job.Scorer, "run", 6, True), (job.Scorer, "encode", 3, False),
    (sinks.Sink, "write", 3, False), (sinks.Sink, "write", 3, True), (sinks.Sink, "finish", 1, False),
    (sinks.Sink, "finish", 1, True), (Path, "replace", 9, False), (Path, "unlink", 1, True),
    (Path, "unlink", 2, True), (Path, "rmdir", 1, False),
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("owner", "name", "at", "after"), MOMENTS)
def test_killed_and_resumed_is_as_if_never_killed(
    owner: Any, name: str, at: int, after: bool, target: str, predictor: Predictor, one_go: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dies(getattr(owner, name), at, after=after))
        try:
            predict(predictor, tmp_path, target)
        except Killed:
            parts = tmp_path / f"{target}.parts"
            if parts.exists():  # what the system had still written of the next window
                (parts / f"{len(list(parts.iterdir())):08d}").write_bytes(b"half a row")
    predict(predictor, tmp_path, target, resume=True)
    assert (tmp_path / target).read_bytes() == (one_go / target).read_bytes()
    aside = f"{target}.bad.jsonl"
    assert (tmp_path / aside).read_text() == (one_go / aside).read_text().replace(str(one_go), str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"d.jsonl", target, aside}


def stop(predictor: Predictor, folder: Path, target: str = "o.jsonl", **options: Any) -> list[str]:
    """Kill a run after its third window; the flags of the same command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job._Job, "_save", dies(job._Job._save, 4, after=True))
        with pytest.raises(Killed):
            predict(predictor, folder, target, **options)
    return [str(folder / "d.jsonl"), "-o", str(folder / target), "--bad-rows", "skip"]


def test_resume_does_only_the_rest(
    run: Path, predictor: Predictor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = stop(predictor, tmp_path)
    assert command("predict", str(run), *flags) == 2
    assert "is unfinished: go on with --resume, or begin again with --overwrite" in capsys.readouterr().err
    assert command("predict", str(run), *flags, "--resume") == 0
    assert "50 rows (23 of them before)" in capsys.readouterr().err
    assert command("predict", str(run), *flags, "--resume") == 0
    assert "o.jsonl is finished" in capsys.readouterr().err


def test_a_resumed_summary_counts_the_exits_of_all_rows(tmp_path: Path) -> None:
    staged = Predictor(Run.open(make_run(tmp_path / "run", exits=EXITS)))
    once = predict(staged, tmp_path, "once.jsonl")
    stop(staged, tmp_path)
    resumed = predict(staged, tmp_path, "o.jsonl", resume=True)
    assert (resumed.exits, resumed.flops, resumed.dense_flops) == (
        once.exits, pytest.approx(once.flops), pytest.approx(once.dense_flops),
    )  # fmt: skip
    assert sum(once.exits) == once.rows == 50
    assert min(once.exits) > 0


def test_overwrite_begins_again_and_keeps_the_old_output_until_the_end(
    predictor: Predictor, one_go: Path, tmp_path: Path
) -> None:
    (tmp_path / "o.jsonl").write_text("old")
    stop(predictor, tmp_path, overwrite=True)
    assert (tmp_path / "o.jsonl").read_text() == "old"
    predict(predictor, tmp_path, "o.jsonl", overwrite=True)
    assert (tmp_path / "o.jsonl").read_bytes() == (one_go / "o.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("option", "cannot resume: options.budget was 'learned' when the run began and is 'full' now"),
        ("input", "cannot resume: input was"),
        ("model", "cannot resume: model was"),
        ("part", "o.jsonl.parts was changed since it was written: begin again with --overwrite"),
        ("state", "cannot be read"),
    ],
)
def test_what_changed_is_refused(
    change: str, message: str, run: Path, predictor: Predictor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = stop(predictor, tmp_path)
    data = tmp_path / "d.jsonl"
    if change == "option":
        flags += ["--budget", "full"]
    elif change == "input":
        data.write_text(data.read_text().replace("film", "firm", 1))
    elif change == "model":
        run = make_run(tmp_path / "other", initializer_range=0.1)
    elif change == "part":
        (tmp_path / "o.jsonl.parts" / "00000001").write_bytes(b"")
    else:
        (tmp_path / "o.jsonl.progress.json").write_text("{")
    assert command("predict", str(run), *flags, "--resume") == 4
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("target", TARGETS)
def test_a_lost_part_is_noticed(target: str, predictor: Predictor, tmp_path: Path) -> None:
    stop(predictor, tmp_path, target)
    (tmp_path / f"{target}.parts" / "00000001").unlink()
    with pytest.raises(ModelError, match=r"00000001 is missing: begin again with --overwrite"):
        predict(predictor, tmp_path, target, resume=True)


def test_a_directory_of_others_beside_the_output_stays(predictor: Predictor, tmp_path: Path) -> None:
    (thesis := tmp_path / "o.jsonl.parts" / "thesis.txt").parent.mkdir()
    thesis.write_text("mine")
    with pytest.raises(UsageError, match=r"thesis\.txt is not of predict's: move .*o\.jsonl\.parts away"):
        predict(predictor, tmp_path, "o.jsonl", overwrite=True)
    (tmp_path / "o.jsonl").touch()
    (tmp_path / "o.jsonl.progress.json").unlink(missing_ok=True)
    predict(predictor, tmp_path, "o.jsonl", resume=True)  # it is finished
    assert thesis.read_text() == "mine"


class Listed:
    """A table of given rows."""

    name = "listed"

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def rows(self) -> Any:
        for line, size in enumerate(self.sizes, 1):
            yield RawRow("listed", line, {"text": "x" * size}) if size else BadRow("empty", "", "", "listed", line)

    def label_names(self, column: str) -> tuple[str, ...]:
        return ()

    def count(self) -> int:
        return len(self.sizes)

    def fingerprint(self) -> tuple[str, int]:
        return "", len(self.sizes)


@given(
    sizes=st.lists(st.integers(0, 60), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=2),
    start=st.integers(0, 3),
    length=st.integers(0, 8),
)
def test_windows_are_the_same_wherever_reading_begins(
    sizes: list[int], cuts: list[int], start: int, length: int
) -> None:
    parts = [Listed(sizes[a:b]) for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), 60], strict=True)]

    def windows(shard: range, done: int = 0) -> list[Any]:
        data = rows.Input(parts, ["text"], Schema("text"), BadRows("count"), shard)
        return [([len(e.text) for e in window], end) for window, end in data.windows(done)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "WINDOW_ROWS", 8)
        patch.setattr(rows, "WINDOW_CHARS", 200)
        all_of_it = windows(range(2**62))
        assert [size for window, _ in all_of_it for size in window] == [size for size in sizes if size]
        assert all(sum(window) <= 200 or len(window) == 1 for window, _ in all_of_it)
        for number, (_, end) in enumerate(all_of_it):
            assert windows(range(2**62), end) == all_of_it[number + 1 :]
        shard = range(8 * start, 8 * (start + length))
        inside = [(window, end) for window, end in all_of_it if shard.start < end <= shard.stop]
        assert windows(shard) == inside
