"""Timing, memory and energy: that they measure what they say. No test asserts a speed."""

from __future__ import annotations

import builtins
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from budgetformer.cost.measure import (
    MemoryUnmeasurableError,
    in_fresh_process,
    measure_energy,
    take_turns,
)
from budgetformer.errors import MissingExtraError, UsageError


def test_rivals_take_turns() -> None:
    calls: list[str] = []
    medians = take_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, seconds=0, least=3)
    assert calls == ["a", "b"] * 4  # a warm-up and three rounds
    assert set(medians) == {"a", "b"}
    assert all(ms >= 0 for ms in medians.values())


def test_rounds_are_bounded() -> None:
    calls: list[int] = []
    take_turns({"a": lambda: calls.append(1)}, seconds=1e9, least=1, most=7)
    assert len(calls) == 8


def test_the_peak_is_that_of_the_work_alone() -> None:
    code = """
from budgetformer.cost.measure import peak, reset_peak
before = reset_peak()
block = bytearray(b"x" * 50_000_000)
high = peak() - before
del block
reset_peak()
print(high > 45_000_000 > peak() - before)
"""  # in a process of its own: a command that trains lets this one keep what it frees
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_a_fresh_process_answers_in_json() -> None:
    code = "import json, sys; print('noise'); print(json.dumps({'got': json.loads(sys.argv[1])}))"
    assert in_fresh_process(["-c", code], [1, "two"]) == {"got": [1, "two"]}
    with pytest.raises(MemoryUnmeasurableError, match="ValueError: no"):
        in_fresh_process(["-c", "raise ValueError('no')"], None)


class Tracker:
    """Stands for CodeCarbon's: 2 J, 0.5 g of CO2, one second, and a processor without a meter."""

    final_emissions_data = SimpleNamespace(energy_consumed=2.0 / 3.6e6, emissions=0.5e-3, duration=1.0)
    _hardware = ()

    def __init__(self, **options: Any) -> None:
        self.start = self.stop = lambda: None


def test_energy_is_labelled_and_counted_a_thousand_texts() -> None:
    pytest.importorskip("codecarbon")
    done = []
    energy = measure_energy(lambda: done.append(sum(range(3_000_000))), 50, "100")
    assert done
    assert energy["source"].startswith(("measured (", "modelled ("))
    assert energy["joules"] > 0
    assert energy["grams_co2"] == pytest.approx(energy["joules"] / 3.6e6 * 100, rel=1e-3)
    assert energy["intensity"] == "100 g/kWh, given"


def test_a_thousand_texts_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("codecarbon"), "OfflineEmissionsTracker", Tracker)
    energy = measure_energy(lambda: None, 250, "FRA")
    assert (energy["joules"], energy["grams_co2"], energy["seconds"]) == (pytest.approx(8.0), pytest.approx(2.0), 1.0)


@pytest.mark.parametrize("carbon", ["XXX", "", "FRA,5"])
def test_what_is_neither_a_country_nor_a_number_is_named(carbon: str) -> None:
    pytest.importorskip("codecarbon")
    with pytest.raises(UsageError, match=f"--carbon {carbon}: .* give a country's three letters, .* or a number"):
        measure_energy(lambda: None, 1, carbon)


def test_a_missing_extra_prints_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("codecarbon"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[carbon\]'"):
        measure_energy(lambda: None, 1, "FRA")
