"""Time, so that noise cancels: rivals take turns in one process, and figures are medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


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
