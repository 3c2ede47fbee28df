"""Peak memory, measured: a fresh process, the kernel's high-water mark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from budgetformer.errors import BudgetFormerError


class MemoryUnmeasurableError(BudgetFormerError):
    """This system does not show a process's high-water mark."""


def in_fresh_process(program: Sequence[str], argument: Any) -> dict[str, Any]:
    """Run a program, such as -m MODULE, in a new Python: its argument is JSON, and so is its last line of output."""
    done = subprocess.run([sys.executable, *program, json.dumps(argument)], capture_output=True, text=True)
    if done.returncode:
        raise MemoryUnmeasurableError(f"the measuring process failed: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def reset_peak() -> int:
    """Forget the high-water mark; the resident size now, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        raise MemoryUnmeasurableError(f"the high-water mark cannot be reset here ({error}): measure on Linux") from None
    return _status("VmRSS")


def peak() -> int:
    """The high-water mark of this process since the last reset, in bytes."""
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise MemoryUnmeasurableError(f"{key} is not in /proc/self/status")
