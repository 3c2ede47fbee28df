"""The schedules against values computed by hand from the paper's constants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetformer.errors import UsageError
from budgetformer.nn import Exploration

PAPER = Exploration()


@pytest.mark.parametrize(("progress", "tau"), [(0.0, 2.0), (0.5, 0.2559615), (1.0, 0.1128021)])
def test_temperature(progress: float, tau: float) -> None:
    assert PAPER.temperature(progress) == pytest.approx(tau, abs=1e-7)


@pytest.mark.parametrize(("progress", "sigma"), [(0.0, 0.5), (0.25, 0.375), (1.0, 0.0)])
def test_noise(progress: float, sigma: float) -> None:
    assert PAPER.noise(progress) == pytest.approx(sigma)


@pytest.mark.parametrize(("progress", "beta"), [(0.0, -0.05), (0.5, 0.0), (0.75, 0.025), (1.0, 0.05)])
def test_entropy_weight(progress: float, beta: float) -> None:
    assert PAPER.entropy_weight(progress) == pytest.approx(beta)


@given(st.floats(0, 1), st.floats(0, 1))
def test_schedules_only_move_one_way(a: float, b: float) -> None:
    early, late = sorted((a, b))
    assert PAPER.temperature(early) >= PAPER.temperature(late) > PAPER.tau_min
    assert PAPER.noise(early) >= PAPER.noise(late) >= 0
    assert PAPER.entropy_weight(early) <= PAPER.entropy_weight(late)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"tau_min": 0.0}, "tau_min"), ({"tau_min": 3.0}, "tau_max"), ({"sigma_max": -1.0}, "sigma_max")],
)
def test_impossible_schedules_are_refused(options: dict[str, float], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        Exploration(**options)
