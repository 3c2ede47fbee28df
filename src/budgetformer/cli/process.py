"""What the command line changes in its own process; the library changes nothing."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

INTERRUPTED = 130  # exit code
_CHOSEN_BY_USER = "OMP_NUM_THREADS" in os.environ
_SMALL_STEP = 2**23  # tokens x width^2 of an optimiser step, below which a second thread waits more than it computes
_CONTENDED = 0.25  # seconds a second that the threads of this process wait for a core: alone 0.02, with another one 1
_CALM_CHECKS = 3  # without contention, before threads spin again


def set_environment() -> None:
    """What libraries read when they are loaded; a variable that the user has set stays.

    OpenMP's threads wait for work by spinning: with another process on the same cores, or a quota, they take the time
    that the others need to get it done. So they only do while nobody else wants the cores, where that can be seen.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers draws one for every file
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ) and os.environ.get("OMP_NUM_THREADS") != "1":
        if Path("/proc/self/schedstat").exists():
            _watch_contention()
        else:
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if not _CHOSEN_BY_USER and (cpus := available_cpus()) < (os.cpu_count() or 1):
        os.environ["OMP_NUM_THREADS"] = str(cpus)


@cache
def _watch_contention() -> None:
    """Once, however many commands this process runs."""
    threading.Thread(target=_spin_only_when_alone, daemon=True).start()


def _spin_only_when_alone(interval: float = 0.1) -> None:
    """Watches how long this process's threads wait for a core, and lets those of OpenMP sleep while it is long.

    libgomp stops spinning while it manages more threads than there are cores. A second team of threads, which does
    nothing, makes it so and ends it again: the only switch there is once it is loaded. No result depends on it.
    """
    release, calm = None, 0
    waited, now = _waiting_for_a_core(), time.monotonic()
    while True:
        time.sleep(interval)
        before, then = waited, now
        waited, now = _waiting_for_a_core(), time.monotonic()
        calm = 0 if waited - before > _CONTENDED * (now - then) else calm + 1
        if release is None and calm == 0 and sys.modules.get("torch"):
            release = threading.Event()
            threading.Thread(target=_hold_idle_team, args=(release,), daemon=True).start()
        elif release and calm >= _CALM_CHECKS:
            release.set()
            release = None


def _hold_idle_team(release: threading.Event) -> None:
    import torch

    torch.zeros(2**18).add_(1)  # large enough to be shared out to a team, which lives as long as this thread
    release.wait()


def _waiting_for_a_core() -> float:
    """The seconds that the threads of this process have been ready to run and did not."""
    seconds = 0.0
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            seconds += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1]) / 1e9
    return seconds


def set_training_threads(tokens: int, width: int) -> None:
    """One thread for a model so small that more would be slower, by the tokens of an optimiser step."""
    import torch

    if not _CHOSEN_BY_USER and tokens * width**2 < _SMALL_STEP:
        torch.set_num_threads(1)


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed for the next step of training, instead of handing it back and asking for it again.

    A step asks for the same sizes each time, and new pages take a tenth of it. False, and nothing is changed, with
    another C library or where the user has set one of its variables.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    # M_MMAP_MAX: none; M_TRIM_THRESHOLD: never, whatever is free; M_TOP_PAD: so much more each time (<malloc.h>)
    return all(mallopt(key, value) for key, value in ((-4, 0), (-1, -1), (-2, 2**28)))


def leave_process_group() -> None:
    """Under torchrun, close gloo's connections to the other processes: left to the interpreter's end, that may abort.

    NCCL would wait for the others, which an error here may have left where they never come to it.
    """
    distributed = sys.modules.get("torch.distributed")
    if (
        distributed
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_backend() == "gloo"
    ):
        distributed.destroy_process_group()


def available_cpus(root: Path = Path("/")) -> int:
    """The processors that this process may use: its affinity, or its control group's quota if that is less."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cpus, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """The limits, in processors, of the control groups that this process is in, of version 1 or 2."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            for group in (top / path.strip("/"), *(top / path.strip("/")).parents):
                with suppress(OSError, ValueError, ZeroDivisionError):
                    if controllers:
                        limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                    else:
                        limit, period = (group / "cpu.max").read_text().split()
                    if (quota := int(limit) / int(period)) > 0:  # "max" is no number, and -1 is no limit
                        yield quota
                if group == top:
                    break


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM is as Ctrl-C: the first of either asks to stop, the second ends the process at once.

    Python calls no handler while native code computes, so a thread counts the signals, which the interpreter writes
    into a pipe as they come.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_watch, args=(reading,), daemon=True).start()
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, terminate)
        os.close(writing)


def _watch(reading: int) -> None:
    asked = False
    while number := os.read(reading, 1):
        if number[0] in (signal.SIGINT, signal.SIGTERM):
            if asked:
                if sys.stderr.isatty():
                    os.write(2, b"\x1b[?25h")  # a progress bar may have hidden the cursor
                os._exit(INTERRUPTED)
            asked = True
    os.close(reading)
