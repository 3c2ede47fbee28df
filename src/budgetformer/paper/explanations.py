"""Hand-written explanations of what the reproduction found, by claim; each was tried before it was written down."""

from __future__ import annotations

EXPLANATIONS: dict[str, str] = {}
