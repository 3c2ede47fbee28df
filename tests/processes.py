"""Command lines in processes of their own, that begin with everything imported: forked, so that none imports torch."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from budgetformer.cli import main


class Done(NamedTuple):
    """How a process ended: its exit code (minus the signal that killed it) and what it wrote on stderr."""

    returncode: int
    stderr: str


def command(*arguments: object) -> int:
    """A command line in this process. -> the exit code."""
    argv, sys.argv = sys.argv, ["budgetformer", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = argv
    return 0


def drop_capabilities() -> None:
    """Give up root's right to read every file; for a forked process, since there is no way back."""
    version_and_process, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None).capset(version_and_process, none):
        raise OSError("capset failed")


def forked(*arguments: object, before: Callable[[], None] = lambda: None) -> Done:
    """A command line in a forked process, after `before` has been called there."""
    with tempfile.TemporaryDirectory() as name:
        error_file = Path(name, "stderr")
        if (child := os.fork()) == 0:
            code = 1
            gc.freeze()  # OpenVINO's models, freed here, would wait for threads that were not forked
            with contextlib.suppress(BaseException), error_file.open("w") as errors:
                os.dup2(errors.fileno(), 2)
                sys.stderr = sys.stdout = errors
                before()
                code = command(*arguments)
                errors.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        return Done(os.waitstatus_to_exitcode(status), error_file.read_text())
