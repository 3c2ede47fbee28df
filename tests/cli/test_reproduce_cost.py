from __future__ import annotations

import json

import pytest

from budgetformer.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["budgetformer", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "reproduce", "cost", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"sizes_mib", "cells"}
    assert len(result["cells"]) == 20
    assert set(result["cells"][0]) == {"dataset", "model", "quantity", "computed", "published", "matches"}


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "reproduce", "cost") == 0
    out = capsys.readouterr().out
    assert out.count("yes") == 20
    assert "197.58 MiB" in out


def test_version_and_unknown_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip()[0].isdigit()
    assert run(monkeypatch, "cots") == 2
    assert "cots" in capsys.readouterr().err
