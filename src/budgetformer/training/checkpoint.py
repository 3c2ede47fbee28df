"""Training state on disk: safetensors and JSON only, written atomically, the newest two kept; and its history.

A checkpoint is a directory `step-N` that appears whole or not at all: it is written under another name, flushed and
then renamed. What a killed process left half-written is removed at the next start, what it was replacing put back.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from budgetformer.errors import MissingExtraError, ModelError
from budgetformer.runs.files import (
    check_hashes,
    check_identity,
    hash_files,
    named_write_errors,
    read_json,
    write_directory,
    write_json,
)

_NEWEST = 2


@dataclass
class State:
    """Where training is: all that changes beside weights, optimiser and random numbers."""

    step: int = 0
    epoch: int = 0  # epochs finished
    batch: int = 0  # batches of the current epoch finished
    best_score: float | None = None
    best_loss: float = float("inf")
    best_epoch: int = 0
    stale_epochs: int = 0
    seconds: float = 0.0
    tokens: int = 0
    history_bytes: int = 0
    sums: dict[str, Any] = field(default_factory=dict)  # of the current epoch


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by parameter name, as flat tensors."""
    return {
        f"{name}|{key}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` took."""
    parameters = dict(model.named_parameters())
    for label, value in tensors.items():
        name, _, key = label.rpartition("|")
        parameter = parameters[name]
        device = "cpu" if key == "step" and not optimizer.param_groups[0].get("fused") else parameter.device
        optimizer.state[parameter][key] = value.to(device).clone()


class Checkpoints:
    """The checkpoints of one run. `identity` must be the same for a run to be resumed."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        self.identity = identity

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("step-*") if p.is_dir())

    def save(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Tensor]) -> None:
        """Write a checkpoint of this moment, then drop old checkpoints and old best models."""

        def fill(folder: Path) -> None:
            weights = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
            save_file(weights, folder / "model.safetensors")
            save_file(optimizer_tensors(model, optimizer), folder / "optimizer.safetensors")
            save_file(extra, folder / "random.safetensors")
            write_json(
                folder / "state.json", {"identity": self.identity, "state": asdict(state), "sha256": hash_files(folder)}
            )

        write_directory(self.folder / f"step-{state.step:08d}", fill)
        for old in self.complete()[:-_NEWEST]:
            shutil.rmtree(old, ignore_errors=True)
        for best in self.folder.glob("best-*"):
            if best != self.best(state):
                shutil.rmtree(best, ignore_errors=True)

    def best(self, state: State) -> Path:
        """Where the best model so far is kept."""
        return self.folder / f"best-{state.best_epoch:04d}"

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, dict[str, Tensor]] | None:
        """Restore the newest checkpoint into model and optimiser; None where there is none."""
        if not (complete := self.complete()):
            return None
        *older, newest = complete
        before = f"continue from {older[-1].name}" if older else "start over"
        remedy = f"the checkpoint is damaged; delete {newest} to {before}"
        saved = read_json(newest / "state.json", remedy)
        check_identity(saved["identity"], self.identity)
        check_hashes(newest, saved["sha256"], ".safetensors", remedy=remedy)
        try:
            tensors = {name: load_file(newest / f"{name}.safetensors") for name in ("model", "optimizer", "random")}
            model.load_state_dict(tensors["model"])
            restore_optimizer(model, optimizer, tensors["optimizer"])
        except (SafetensorError, OSError, RuntimeError, KeyError) as error:
            raise ModelError(f"{newest}: {remedy} ({str(error).splitlines()[0]})") from error
        return State(**saved["state"]), tensors["random"]


class History:
    """Appends records to RUN/history.jsonl, and to TensorBoard's events on request."""

    def __init__(self, folder: Path, *, tensorboard: bool = False) -> None:
        self.file = folder / "history.jsonl"
        self._tracker: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise MissingExtraError("track", "tensorboard") from None
            self._tracker = SummaryWriter(str(folder / "tensorboard"))

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
