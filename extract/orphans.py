"""A process that was started by another ends with it, however that one dies."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys


def end_with_parent(signal_number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent process dies. Does nothing outside of Linux, or without a parent of ours.

    parent: the process that started this one, when `multiprocessing` did not; must have done so from a thread that lives as long.
    """
    if (parent is None and multiprocessing.parent_process() is None) or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal_number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it died before it could be watched
        os.kill(os.getpid(), signal_number)
