"""What `budgetformer serve` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from budgetformer.errors import UsageError

DIALS = ("learned", "full", "fixed", "max")  # those of every run that give the same answer twice


@dataclass(frozen=True)
class Settings:
    """A service's run, its batches and its limits; each has its flag."""

    run: Path
    budget: str = "learned"
    batch_tokens: int = 8192
    wait_ms: float = 2.0
    queue: int = 256
    max_texts: int = 64
    max_chars: int = 20_000
    max_bytes: int = 2**20
    timeout: float = 10.0
    workers: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "queue", "max_texts", "max_chars", "max_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: it must be at least 1")
        if not 0 <= self.wait_ms <= 1000:
            raise UsageError(f"--wait-ms {self.wait_ms}: give milliseconds from 0 to 1000")
        if not 0 < self.timeout <= 3600:
            raise UsageError(f"--timeout {self.timeout}: give seconds, more than 0 and at most 3600")
        if self.max_texts > self.queue:
            raise UsageError(
                f"--max-texts {self.max_texts} is more than --queue {self.queue}: one request could never be taken; "
                "raise --queue"
            )
