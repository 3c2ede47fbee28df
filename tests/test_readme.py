"""README and docs promise nothing that is not there: its verbs exist, the tests it names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import typer

from budgetformer.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


def test_every_verb_and_make_target_exists() -> None:
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    checked = 0
    docs = (README, *((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("training.md", "speed.md")))
    for line in "\n".join(block for text in docs for block in blocks("sh", text)).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["budgetformer"]:
            options = {name for parameter in verbs[words[1]].params for name in parameter.opts} | {"-h", "--help"}
            assert {w for w in words if w.startswith("--")} <= options, line
            checked += 1
        elif words[:1] == ["make"]:
            assert words[1] in targets, line
            checked += 1
    assert checked >= 11


def test_the_tests_that_the_equations_name_exist() -> None:
    text = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:([\w/]+\.py))?::(test_\w+)`", text)
    assert len(named) >= 20
    file = ""
    for path, test in named:
        file = path or file
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (file, test)
    for path, function in re.findall(r"`([\w/]+\.py): ([\w.]+)`", text):
        home = ROOT if path.startswith("reproduction/") else ROOT / "src" / "budgetformer"
        source = (home / path).read_text(encoding="utf-8")
        assert re.search(rf"(def|class) {function.split('.')[-1]}\b", source), (path, function)
