"""Hand-written explanations of what the reproduction found, by the key that the claim's code gives it."""

from __future__ import annotations

EXPLANATIONS: dict[str, str] = {}
