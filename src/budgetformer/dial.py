"""How much of a model runs: the budget of a prediction, as users write it."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from budgetformer.errors import UsageError

_DIAL_HELP = (
    "a share of the dense model's cost such as 0.3, learned, full, fixed:X, max:X, mean:X (X in [0, 1]), or the "
    "paper's ablations override:X and random"
)

_WITH_VALUE = ("share", "exit", "fixed", "max", "mean", "override")


@dataclass(frozen=True)
class Dial:
    """How much of the model runs at inference: a choice made after training.

    `share`, written as a number, is the mean share of the dense model's cost, and `exit` the limit of the rule by which
    texts leave early: both are for models with exits, whose heads then run as learned. The others are for heads.
    `learned`, `full`, `fixed` and `max` set the number of heads and never the weights; so does `mean`, a mean over
    inputs, where heads are ranked across layers. `override` (s replaced inside w and k) and `random` (scores replaced
    by noise) are the paper's ablations.
    """

    mode: Literal["learned", "full", "share", "exit", "fixed", "max", "mean", "override", "random"] = "learned"
    value: float | None = None

    @classmethod
    def parse(cls, text: str | float | Dial | None) -> Dial:
        """Read `0.3`, `learned`, `full`, `fixed:0.25`, `max:0.5`, `override:0.5` or `random`."""
        if text is None:
            return cls()
        if isinstance(text, Dial):
            return text
        with suppress(ValueError):
            return cls("share", float(text))
        mode, colon, number = str(text).partition(":")
        try:
            value = float(number) if colon else None
        except ValueError:
            raise UsageError(f"budget {text!r}: {number!r} is not a number; give {_DIAL_HELP}") from None
        return cls(mode, value)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.mode not in ("learned", "full", "random", *_WITH_VALUE):
            raise UsageError(f"budget {self.mode!r} is not known: give {_DIAL_HELP}")
        if (self.mode in _WITH_VALUE) != (self.value is not None):
            raise UsageError(f"budget {str(self)!r} is not known: give {_DIAL_HELP}")
        if self.value is not None and not 0 <= self.value <= (math.inf if self.mode == "exit" else 1):
            what = "cost that is spent" if self.mode == "share" else "heads that run"
            raise UsageError(f"budget {self}: {self.value} is outside [0, 1]; it is the fraction of {what}")

    @property
    def heads(self) -> Dial:
        """The budget of the gates: budgets of depth leave the heads as learned."""
        return Dial() if self.mode in ("share", "exit") else self

    def __str__(self) -> str:
        """What `parse` reads back as the same dial."""
        if self.value is None:
            return self.mode
        number = repr(float(self.value)).removesuffix(".0")
        return number if self.mode == "share" else f"{self.mode}:{number}"
