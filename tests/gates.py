"""Flat options of a config, sorted."""

from __future__ import annotations

from typing import Any

from budgetformer.models.gates import KINDS

EVERY = {option for kind in KINDS.values() for option in kind.options()}


def sorted_options(kind: str = "learned", **options: Any) -> dict[str, Any]:
    """The config's options and, in `gates`, those of the gates; what this kind lacks is left out."""
    known = KINDS[kind].options()
    gates = {"kind": kind, **{key: value for key, value in options.items() if key in known}}
    return {**{key: value for key, value in options.items() if key not in EVERY}, "gates": gates}
