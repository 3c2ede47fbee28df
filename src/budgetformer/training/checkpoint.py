"""Training state on disk: safetensors and JSON only, written atomically, the newest two kept.

A checkpoint is a directory `step-N` that appears whole or not at all: it is written under another name, flushed and
then renamed. What a killed process left half-written is removed at the next start, what it was replacing put back.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from budgetformer.errors import ModelError
from budgetformer.runs.files import check_identity, read_json, write_directory, write_json

_KEPT = 2


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

    def found(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("step-*") if p.is_dir())

    def save(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Tensor]) -> None:
        """Write a checkpoint of this moment, then drop old checkpoints and old best models."""

        def fill(folder: Path) -> None:
            weights = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
            save_file(weights, folder / "model.safetensors")
            save_file(optimizer_tensors(model, optimizer), folder / "optimizer.safetensors")
            save_file(extra, folder / "random.safetensors")
            write_json(folder / "state.json", {"identity": self.identity, "state": asdict(state)})

        write_directory(self.folder / f"step-{state.step:08d}", fill)
        for old in self.found()[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        for best in self.folder.glob("best-*"):
            if best != self.best(state):
                shutil.rmtree(best, ignore_errors=True)

    def best(self, state: State) -> Path:
        """Where the best model so far is kept."""
        return self.folder / f"best-{state.best_epoch:04d}"

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, dict[str, Tensor]] | None:
        """Restore the newest checkpoint into model and optimiser; None where there is none."""
        if not (found := self.found()):
            return None
        newest = found[-1]
        before = f"continue from {found[-2].name}" if len(found) > 1 else "start over"
        remedy = f"the checkpoint is damaged; delete {newest} to {before}"
        saved = read_json(newest / "state.json", remedy)
        check_identity(saved["identity"], self.identity)
        try:
            tensors = {name: load_file(newest / f"{name}.safetensors") for name in ("model", "optimizer", "random")}
            model.load_state_dict(tensors["model"])
            restore_optimizer(model, optimizer, tensors["optimizer"])
        except (SafetensorError, OSError, RuntimeError, KeyError) as error:
            raise ModelError(f"{newest}: {remedy} ({str(error).splitlines()[0]})") from error
        return State(**saved["state"]), tensors["random"]
