"""Energy and carbon of a piece of work, by CodeCarbon in offline mode, labelled measured or modelled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from budgetformer.errors import MissingExtraError, UsageError

_MEASURED = {"intel_rapl", "intel_power_gadget", "powermetrics", "nvml"}


@dataclass(frozen=True)
class Energy:
    """What some texts cost. `source` says where the figures come from: a meter, or a model of the hardware."""

    texts: int
    joules: float
    grams_co2: float
    seconds: float
    source: str  # "measured (...)" or "modelled (...)"
    intensity_from: str

    @property
    def per_thousand(self) -> dict[str, float]:
        share = 1000 / max(1, self.texts)
        return {"joules": self.joules * share, "grams_co2": self.grams_co2 * share}


def measure(
    work: Callable[[], object], texts: int, *, country: str | None = None, intensity: float | None = None
) -> Energy:
    """Run `work` under a tracker. Give a country (three letters) or an intensity in g CO2 a kWh."""
    if (country is None) == (intensity is None):
        raise UsageError("give either --country (three letters, e.g. FRA) or --intensity (g CO2 a kWh)")
    try:
        from codecarbon import OfflineEmissionsTracker
        from codecarbon.input import DataSource
    except ImportError:
        raise MissingExtraError("carbon", "codecarbon") from None
    mixes = DataSource().get_global_energy_mix_data()  # type: ignore[no-untyped-call]
    if country is not None and country not in mixes:
        raise UsageError(
            f"--country {country}: CodeCarbon has no energy mix for it; give a three-letter code, e.g. FRA"
        )
    options: dict[str, Any] = {"country_iso_code": country or "FRA", "save_to_file": False}
    if intensity is not None:
        options["force_carbon_intensity_g_co2e_kwh"] = intensity
    logging.getLogger("codecarbon").setLevel(logging.CRITICAL)  # its log_level comes too late for its first lines
    tracker = OfflineEmissionsTracker(
        **options, log_level="critical", tracking_mode="process", measure_power_secs=5, allow_multiple_runs=True
    )
    tracker.start()
    try:
        work()
    finally:
        tracker.stop()
    data = tracker.final_emissions_data
    return Energy(
        texts=texts,
        joules=data.energy_consumed * 3.6e6,
        grams_co2=data.emissions * 1000,
        seconds=data.duration,
        source=_source(tracker),
        intensity_from=f"{intensity:g} g/kWh, given" if intensity is not None else f"CodeCarbon's table for {country}",
    )


def _source(tracker: Any) -> str:
    """Which parts were read off a meter. CodeCarbon models the RAM always, and the CPU where it finds no meter."""
    modes = {type(h).__name__.lower(): str(getattr(h, "_mode", "")) for h in tracker._hardware}
    measured = sorted(name for name, mode in modes.items() if mode in _MEASURED or name == "gpu")
    modelled = sorted(name for name in modes if name not in measured)
    if not measured:
        return f"modelled ({', '.join(modelled)})"
    return f"measured ({', '.join(measured)}), the rest modelled ({', '.join(modelled)})"
