"""Time, memory and energy of a piece of work, measured so that noise cancels, and labelled where they are modelled."""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from budgetformer.errors import BudgetFormerError, MissingExtraError, UsageError

_METERS = {"intel_rapl", "intel_power_gadget", "powermetrics", "nvml"}


def take_turns(
    rivals: Mapping[str, Callable[[], object]], *, seconds: float = 1.0, least: int = 5, most: int = 200
) -> dict[str, float]:
    """The median time of a call of each rival, in milliseconds.

    The rivals run one after the other, round after round, for about `seconds` in all, so that a slow moment of the
    machine hits all alike.
    """
    for call in rivals.values():
        call()
    began = time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in rivals}
    rounds = 0
    while rounds < least or (time.perf_counter() - began < seconds and rounds < most):
        for name, call in rivals.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


class MemoryUnmeasurableError(BudgetFormerError):
    """This system does not show a process's high-water mark."""


def in_fresh_process(program: Sequence[str], argument: Any) -> dict[str, Any]:
    """Run a program, such as -m MODULE, in a new Python: its argument is JSON, and so is its last line of output."""
    done = subprocess.run([sys.executable, *program, json.dumps(argument)], capture_output=True, text=True)
    if done.returncode:
        raise MemoryUnmeasurableError(f"the measuring process failed: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def reset_peak() -> int:
    """Forget the high-water mark; the resident size now, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        raise MemoryUnmeasurableError(f"the high-water mark cannot be reset here ({error}): measure on Linux") from None
    return _status("VmRSS")


def peak() -> int:
    """The high-water mark of this process since the last reset, in bytes."""
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise MemoryUnmeasurableError(f"{key} is not in /proc/self/status")


def measure_energy(work: Callable[[], object], texts: int, carbon: str) -> dict[str, Any]:
    """Run `work` on so many texts under CodeCarbon, offline: joules and grams of CO2 per thousand of them.

    `carbon` is a country's three letters, or a number of g CO2 per kWh. `source` says where the figures come from, a
    meter or a model of the hardware, `intensity` where the carbon of a kWh does.
    """
    try:
        from codecarbon import OfflineEmissionsTracker
        from codecarbon.input import DataSource
    except ImportError:
        raise MissingExtraError("carbon", "codecarbon") from None
    options: dict[str, Any] = {"country_iso_code": carbon}
    intensity = f"CodeCarbon's table for {carbon}"
    if carbon not in DataSource().get_global_energy_mix_data():  # type: ignore[no-untyped-call]
        try:
            options = {"country_iso_code": "FRA", "force_carbon_intensity_g_co2e_kwh": float(carbon)}
        except ValueError:
            raise UsageError(
                f"--carbon {carbon}: CodeCarbon has no energy mix for it; give a country's three letters, e.g. FRA, "
                "or a number of g CO2 per kWh"
            ) from None
        intensity = f"{float(carbon):g} g/kWh, given"
    logging.getLogger("codecarbon").setLevel(logging.CRITICAL)  # its log_level comes too late for its first lines
    tracker = OfflineEmissionsTracker(
        **options, save_to_file=False, log_level="critical", tracking_mode="process", measure_power_secs=5,
        allow_multiple_runs=True,
    )  # fmt: skip
    tracker.start()
    try:
        work()
    finally:
        tracker.stop()
    data, thousands = tracker.final_emissions_data, max(1, texts) / 1000
    figures = {"joules": data.energy_consumed * 3.6e6 / thousands, "grams_co2": data.emissions * 1000 / thousands}
    return {**figures, "seconds": data.duration, "source": _source(tracker), "intensity": intensity}


def _source(tracker: Any) -> str:
    """Which parts were read off a meter. CodeCarbon models the RAM always, and the CPU where it finds no meter."""
    modes = {type(h).__name__.lower(): str(getattr(h, "_mode", "")) for h in tracker._hardware}
    measured = sorted(name for name, mode in modes.items() if mode in _METERS or name == "gpu")
    modelled = f"modelled ({', '.join(sorted(name for name in modes if name not in measured))})"
    return f"measured ({', '.join(measured)}), the rest {modelled}" if measured else modelled
