"""The settings of a service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from budgetformer.errors import UsageError

KEY = "BUDGETFORMER_API_KEY"  # in the environment: what requests must carry
_Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Settings:
    """A service's run, its batches and its limits; `serve --set` changes those from `batch_tokens` on."""

    run: Path
    budget: str | None = None  # as learned, or as exported
    host: str = "127.0.0.1"  # the address to listen on
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    allowed_hosts: tuple[str, ...] = ()  # that requests may name besides the address; "*": any
    workers: _Count = 1
    threads: _Count | None = None
    batch_tokens: _Count = 8192  # of a batch, with padding; 1: no batching
    wait_ms: Annotated[float, Field(ge=0, le=1000)] = 2.0  # how long a text may wait for others to share its batch
    queue: _Count = 256  # texts taken in and not yet answered, of a worker; above it: 503
    max_texts: _Count = 64  # of a request
    max_chars: _Count = 20_000  # of a text
    max_bytes: _Count = 2**20  # of a body
    timeout: Annotated[float, Field(gt=0, le=3600)] = 10.0  # seconds for a request
    audit: Annotated[float, Field(ge=0, le=1)] = 0.05  # of early answers, run to the end in idle time; 0: none

    @model_validator(mode="after")
    def _one_request_fits(self) -> Self:
        if self.max_texts > self.queue:
            raise ValueError(f"max_texts={self.max_texts} is more than queue={self.queue}: raise queue")
        return self

    @classmethod
    def make(cls, changes: Sequence[str] = (), **options: Any) -> Settings:
        """Settings with changes such as `queue=512`."""
        try:
            return cls(**{**options, **dict(change.partition("=")[::2] for change in changes)})
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"--set {key}={first['input']}: " for key in first["loc"])
            raise UsageError(f"{where}{first['msg'].removeprefix('Value error, ')} (see --help)") from None
