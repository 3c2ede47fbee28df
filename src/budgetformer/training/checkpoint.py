"""Training state on disk: safetensors and JSON only, written atomically, the newest two kept.

A checkpoint is a directory `step-N` that appears whole or not at all: it is written under another name, flushed and
then renamed. What a killed process left half-written is removed at the next start.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from budgetformer.errors import ModelError
from budgetformer.training.recipe import same

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


def write_json(path: Path, data: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    with explained(path):
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(data, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def read_json(path: Path, remedy: str) -> Any:
    """Read JSON that this program wrote; a damaged or missing file is named."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: {remedy}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): {remedy}") from None


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn a failed write into an error that says what to do; what was saved before stays."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        why = "the disk is full" if full else f"it cannot be written ({error})"
        raise ModelError(f"{path}: {why}. What was saved before is intact: mend it and go on with --resume") from error


def write_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Make a directory by `fill`, visible under its name only when it is complete and on disk."""
    temporary = target.with_name(f".{target.name}.tmp")
    with explained(target):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            fill(temporary)
            for path in (*temporary.iterdir(), temporary):
                flush(path)
            if target.exists():  # a whole one must stand there until the new one does
                target.rename(old := target.with_name(f".{target.name}.old.tmp"))
                temporary.rename(target)
                shutil.rmtree(old)
            else:
                temporary.rename(target)
            flush(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def flush(path: Path) -> None:
    """See that a file's or directory's content is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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

    def clean(self) -> None:
        """Remove what a killed process left half-written."""
        for path in self.folder.glob(".*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

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


def check_identity(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume a run that began with something else; the first difference is named."""
    for key, value in now.items():
        before, what = saved.get(key), key
        if same(before, value):
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            inner = next(k for k in {**value, **before} if not same(value.get(k), before.get(k)))
            before, value, what = before.get(inner), value.get(inner), f"{key}.{inner}"
        raise ModelError(
            f"cannot resume: {what} was {before!r} when the run began and is {value!r} now. "
            "Use what the run began with, or start a new run with another -o"
        )
