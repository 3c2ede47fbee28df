"""Where a result comes from: versions, machine, commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import accelerate
import torch
import transformers

import budgetformer


def environment() -> dict[str, str | int | None]:
    """Versions, threads, processor and, in a checkout, the commit."""
    return {
        "budgetformer": budgetformer.__version__,
        "commit": _commit(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "threads": torch.get_num_threads(),
        "cpu": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "platform": platform.platform(),
    }


def _commit() -> str | None:
    here = Path(budgetformer.__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
