"""Every command and every piece of Python of README and docs is run on small data, page by page."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from budgetformer.training.recipe import PRESETS
from tests.models.tiny import save_base
from tests.processes import command
from tests.test_readme import README, ROOT, blocks
from tests.training.toy import write_reviews

PAGES = {"README.md": README} | {
    page.name: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))
}
NOT_RUN = {  # by how a command begins
    "make demo": "trains for minutes on real reviews; the tutorial is run on some of them",
    "make test": "is what runs this",
    "make install": "is done before this runs",
    ". .venv/bin/activate": "is for a shell",
    "budgetformer train ag_news": "needs AG News",
    "budgetformer bench runs/wide": "needs a run on AG News",
    "budgetformer eval runs/wide": "needs a run on AG News",
    "zcat ": "a pipe; tests/predict reads standard input",
    "budgetformer predict runs/reviews big.jsonl": "a shell's $I; tests/predict runs shards",
    "cat ": "joins what the line above writes",
    "budgetformer predict runs/reviews folder/": "tests/predict runs Ray",
    "python benchmarks/": "measures for minutes or hours",
    "pip install": "changes the environment, and needs a network",
}
SMALLER = {  # what a verb gets besides, so that it takes seconds
    "train reviews.csv --base": "--epochs 1 --max-length 16 --limit 60 --set dense_epochs=1",
    "train": "--preset tiny --epochs 1 --max-length 32 --limit 200 --set vocab_size=1000",
    "bench": "--shape 16x2x1 --batch 1 --length 8",
    "bench runs/reviews": "--texts 12",
    "bench --what onnx": "--shape 16x8x1",
}
RUN_HERE = ("tutorial.md", "stages.md", "retrofit.md", "width.md", "predict.md", "export.md", "serve.md")
FIRST = "budgetformer train reviews.csv -o runs/reviews --with-baseline"  # what other pages take for granted


def commands(text: str) -> list[str]:
    lines = "\n".join(blocks("sh", text)).replace("\\\n", " ").splitlines()
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


class World:
    """A folder with what the pages take for granted. What was done in it is not done again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.done = folder, set[str]()
        self.server: subprocess.Popen[str] | None = None
        self.address = ""

    def run(self, line: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = shlex.split(line)
        if "runs/reviews" in words and line != FIRST and FIRST not in self.done:
            self.run(FIRST, capsys)
        if words[:2] == ["budgetformer", "serve"]:
            self.serve(words[1:])
        elif words[0] == "budgetformer":
            words = [word.replace("MODEL_OR_DIR", "base") for word in words]
            extra = next((SMALLER[name] for name in sorted(SMALLER, reverse=True) if line[13:].startswith(name)), "")
            if words[1] == "predict" and "-o" in words:
                extra = "--overwrite"  # pages write to the same name
            code = command(*words[1:], *extra.split())
            assert code == 0, (line, capsys.readouterr().err)
        elif words[0] == "curl":
            sent = [word.replace("localhost:8000", self.address) for word in words]
            # The service says where it is before it is ready.
            patient = ["--fail", "--retry", "60", "--retry-delay", "1", "--retry-connrefused"]
            answer = subprocess.run([*sent, *patient], capture_output=True, text=True, check=True).stdout
            assert "error" not in json.loads(answer), answer
        else:
            pytest.fail(f"{line}: no way to run this is known: add one, or a reason to NOT_RUN")
        self.done.add(line)

    def serve(self, words: list[str]) -> None:
        self.stop()
        started = [sys.executable, "-m", "budgetformer", *words, "--port", "0"]
        self.server = subprocess.Popen(started, stderr=subprocess.PIPE, text=True, cwd=self.folder)
        assert self.server.stderr is not None
        said = ""
        while not (result := re.search(r"http://([\w.]+:\d+)", said)):
            line = self.server.stderr.readline()
            assert line, f"the service ended: {said}"
            said += line
        self.address = result[1]

    def stop(self) -> None:
        if self.server:
            self.server.terminate()
            self.server.communicate(timeout=60)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("docs"))
    write_reviews(world.folder / "reviews.csv", rows=100)
    save_base(world.folder / "base", intermediate_size=64)
    for name in ("held_out.csv", "new.csv", "test.csv"):
        write_reviews(world.folder / name, rows=20, seed=1)
    yield world
    world.stop()


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_python_of(
    page: str, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world.folder)
    for recipe in blocks("toml", PAGES[page]):
        written = tomllib.loads(recipe)
        PRESETS[written.pop("preset")].changed(written, where=page)
    ran = list[str]()
    parts = re.findall(r"```(sh|python)\n(.*?)```", PAGES[page], flags=re.S)
    for language, code in parts:
        # tests/models runs what wants a model of the hub.
        if language == "python" and page != "retrofit.md":
            exec(compile(code, page, "exec"), {"__name__": "__main__"})
        for line in commands(f"```{language}\n{code}```"):
            if line not in world.done and not line.startswith(tuple(NOT_RUN)):
                world.run(line, capsys)
                ran.append(line)
    assert ran or page not in RUN_HERE, "nothing of this page was run"


def test_every_reason_is_for_a_command() -> None:
    lines = [line for text in PAGES.values() for line in commands(text)]
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)] == []


def test_the_reference_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python docs/make_reference.py"
