"""What the command line changes in its own process before anything heavy is imported; the library changes nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # exit code


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
