"""The directory of a run: nothing that is not ours is deleted, and only one process trains in it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from budgetformer.errors import UsageError
from budgetformer.runs.files import LOCK, locked
from budgetformer.runs.record import FORMAT_VERSION
from tests.cli.test_train import SMALL, ending
from tests.processes import command, forked

PREPARING = {"format_version": FORMAT_VERSION, "status": "preparing"}


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"run.json": {"status": "preparing"}, "tokenizer.json": {}}, 4),  # somebody else's run.json
        ({"run.json": {}, "tokenizer.json": {}}, 4),
        ({"run.json": PREPARING, "notes.txt": "mine"}, 2),
        ({"tokenizer.json": {}}, 2),
        ({LOCK: "", "notes.txt": "mine"}, 2),
    ],
)
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_what_is_not_ours_stays(
    files: dict[str, object], code: int, resume: list[str], reviews: Path, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert command("train", reviews, "-o", tmp_path, *SMALL, *resume) == code
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_second_process_in_the_same_directory_is_refused(
    resume: list[str], reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", reviews, "-o", tmp_path / "run", *SMALL]
    assert forked(*arguments, before=ending(signal.SIGKILL, 3)).returncode == -signal.SIGKILL
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with locked(tmp_path / "run", "training"):
        refused = forked(*arguments, *resume)
    assert refused.returncode == 2
    expected = "another process is training in" if resume else "holds a run already"
    assert expected in refused.stderr
    (tmp_path / "run" / LOCK).touch()  # as the killed process left it
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert command(*arguments, "--resume") == 0
    assert not (tmp_path / "run" / LOCK).exists()


def test_two_that_begin_at_once(reviews: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run", "training"):
        refused = forked("train", reviews, "-o", tmp_path / "run", *SMALL)
    assert refused.returncode == 2
    assert f"another process is training in {tmp_path / 'run'}: wait for it, or give another -o" in refused.stderr
    assert list((tmp_path / "run").iterdir()) == []


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path, "training"), pytest.raises(UsageError), locked(tmp_path, "training"):
            pass
    assert list(tmp_path.iterdir()) == []
