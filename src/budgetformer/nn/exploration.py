"""The schedules of training: from exploring heads to exploiting them, as functions of progress t/T."""

from __future__ import annotations

import math
from dataclasses import dataclass

from budgetformer.errors import UsageError


@dataclass(frozen=True)
class Exploration:
    """Temperature, noise and entropy weight at a given progress t/T in [0, 1]."""

    tau_max: float = 2.0
    tau_min: float = 0.1
    gamma: float = 5.0
    sigma_max: float = 0.5
    beta_max: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.tau_min <= self.tau_max:
            raise UsageError(
                f"tau_min={self.tau_min} and tau_max={self.tau_max}: give 0 < tau_min <= tau_max, "
                "a softmax has no temperature zero"
            )
        for name in ("gamma", "sigma_max", "beta_max"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)}: give a number that is not negative")

    def temperature(self, progress: float) -> float:
        """tau(t) = tau_min + (tau_max - tau_min) exp(-gamma t/T)."""
        return self.tau_min + (self.tau_max - self.tau_min) * math.exp(-self.gamma * progress)

    def noise(self, progress: float) -> float:
        """The standard deviation of the noise on the head scores: sigma_max (1 - t/T)."""
        return self.sigma_max * (1.0 - progress)

    def entropy_weight(self, progress: float) -> float:
        """beta(t) = beta_max (2 t/T - 1): negative while exploring, positive while exploiting."""
        return self.beta_max * (2.0 * progress - 1.0)
