"""The wheel and the sdist hold what a user needs, and the installed wheel works outside the source tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import budgetformer

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_every_file_of_the_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    package = ROOT / "src" / "budgetformer"
    expected = {f"budgetformer/{f.relative_to(package)}" for f in package.rglob("*") if f.is_file()}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in expected if "__pycache__" not in name} <= names
    assert "budgetformer/py.typed" in names


def test_the_sdist_builds_and_tests_itself(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "constraints.txt", "CITATION.cff", "tests/conftest.py"} <= names
    assert "requirements-runtime.txt" in names
    assert not {name for name in names if name.startswith((".venv", "runs/"))}


def test_the_installed_wheel_answers_outside_the_source_tree(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    program = "import budgetformer; print(budgetformer.__file__); from budgetformer.cli import main; main()"
    command = [sys.executable, "-c", program, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "predict" in done.stdout


def test_the_citation_names_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", citation, flags=re.M)[1] == budgetformer.__version__  # type: ignore[index]
