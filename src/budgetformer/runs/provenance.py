"""Where a result comes from: versions, machine, commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import budgetformer

_FLAGS = ("avx", "amx", "fma", "neon", "sve")  # the instructions that decide how fast products are


def environment(*packages: str) -> dict[str, str | int | None]:
    """Versions, also of other packages, threads, processor and, in a checkout, the commit."""
    import torch
    import transformers

    return {
        "budgetformer": budgetformer.__version__,
        "commit": _commit(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: metadata.version(name) for name in ("accelerate", *packages)},
        "threads": torch.get_num_threads(),
        "cpu": _cpuinfo("model name") or platform.processor(),
        "cpu_flags": " ".join(flag for flag in _cpuinfo("flags").split() if flag.startswith(_FLAGS)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "platform": platform.platform(),
    }


def saturates() -> bool:
    """Whether int8 products of 8 bits overflow here: on x86 without VNNI, which adds pairs of them in 16 bits."""
    flags = _cpuinfo("flags").split()
    return "avx2" in flags and not any("vnni" in flag for flag in flags)


def multiplies_bf16() -> bool:
    """Whether the processor says that it has instructions for products of bf16."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpuinfo("flags").split())


def _commit() -> str | None:
    here = Path(budgetformer.__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _cpuinfo(key: str) -> str:
    """What Linux says of the first processor; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")
