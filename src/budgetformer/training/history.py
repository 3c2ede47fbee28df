"""history.jsonl: a line for some steps and for every epoch; and the same for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from budgetformer.errors import MissingExtraError
from budgetformer.runs.files import named_write_errors


class History:
    """Appends records to RUN/history.jsonl, and to TensorBoard's events on request."""

    def __init__(self, folder: Path, *, tensorboard: bool = False) -> None:
        self.file = folder / "history.jsonl"
        self._tracker = _tracker(folder / "tensorboard") if tensorboard else None

    def truncate(self, size: int) -> None:
        """Forget lines written after the checkpoint that we go on from."""
        with named_write_errors(self.file), self.file.open("ab") as file:
            file.truncate(min(size, file.seek(0, 2)))

    def write(self, record: dict[str, Any]) -> int:
        """Append a record. -> its bytes."""
        line = (json.dumps(record) + "\n").encode()
        with named_write_errors(self.file), self.file.open("ab") as file:
            file.write(line)
        if self._tracker:
            parts = {"train": record} if record["kind"] == "step" else {k: record[k] for k in ("train", "validation")}
            for part, figures in parts.items():
                for name in (n for n, value in figures.items() if isinstance(value, float)):
                    self._tracker.add_scalar(f"{part}/{name}", figures[name], record["step"])
        return len(line)

    def close(self) -> None:
        if self._tracker:
            self._tracker.close()


def _tracker(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtraError("track", "tensorboard") from None
    return SummaryWriter(str(folder))
