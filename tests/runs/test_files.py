"""Files and directories that are whole or not there, whenever the process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from budgetformer.errors import ModelError
from budgetformer.runs.files import recover_directories, write_directory

DIES_IN_RENAME = """
import os, sys
from pathlib import Path
from budgetformer.runs.files import write_directory
renames, rename = 0, Path.rename
def dying(self, target):
    global renames
    renames += 1
    if renames == int(sys.argv[2]):
        os._exit(9)
    return rename(self, target)
Path.rename = dying
write_directory(Path(sys.argv[1]), lambda folder: (folder / "content").write_text("new") and None)
"""


def content(folder: Path) -> str:
    return (folder / "content").read_text()


@pytest.mark.parametrize("rename", [1, 2])
def test_a_process_that_dies_while_it_replaces_a_directory_leaves_the_old_one(tmp_path: Path, rename: int) -> None:
    target = tmp_path / "model"
    write_directory(target, lambda folder: (folder / "content").write_text("old") and None)
    died = subprocess.run([sys.executable, "-c", DIES_IN_RENAME, str(target), str(rename)])
    assert died.returncode == 9
    recover_directories(tmp_path)
    assert content(target) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_next_write_alone_recovers_too(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_directory(target, lambda folder: (folder / "content").write_text("old") and None)
    subprocess.run([sys.executable, "-c", DIES_IN_RENAME, str(target), "2"])

    def fails(folder: Path) -> None:
        raise OSError("no")

    with pytest.raises(ModelError, match="cannot be written"):
        write_directory(target, fails)
    assert content(target) == "old"
    write_directory(target, lambda folder: (folder / "content").write_text("new") and None)
    assert content(target) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_rename_puts_the_old_directory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename = tmp_path / "model", Path.rename
    write_directory(target, lambda folder: (folder / "content").write_text("old") and None)

    def failing(self: Path, new: Path) -> Path:
        if self.name == ".model.tmp":
            raise OSError(28, "No space left on device")
        return rename(self, new)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ModelError, match="the disk is full"):
        write_directory(target, lambda folder: (folder / "content").write_text("new") and None)
    assert content(target) == "old"
