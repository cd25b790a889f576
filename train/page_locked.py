"""Page-locked memory for rows: a GPU fetches it by itself, at the full speed of the bus and beside other work.

In: a device and shapes. Out: uint16 arrays. Locked in place, since PyTorch's own pinned memory comes in powers of two: 512 MB for a
row of 335. Where the system refuses, the array stays ordinary memory, which is right but slower, and that is said once.
"""

from __future__ import annotations

import math
import mmap
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

Allocate = Callable[[tuple[int, ...]], np.ndarray]
PORTABLE = 1
"""cudaHostRegisterPortable: locked for every GPU's context, whichever is current."""


def row_memory(device: torch.device) -> Allocate:
    """What makes memory for rows that go to `device`: page-locked for a GPU, ordinary for all else."""
    return PageLocked(device) if device.type == "cuda" else ordinary


def ordinary(shape: tuple[int, ...]) -> np.ndarray:
    """uint16 of `shape`, undefined."""
    return np.empty(shape, np.uint16)


def whole_pages(shape: tuple[int, ...]) -> np.ndarray:
    """uint16 of `shape`, zeros, on pages that hold nothing else: a page can be locked only once. Large pages where the system has them."""
    memory = mmap.mmap(-1, 2 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint16).reshape(shape)


class PageLocked:
    """Makes arrays that stay locked as long as they live. Called seldom: rows' memory is used again."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._refused = device, False

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        """uint16 of `shape`, undefined."""
        if self._refused or not math.prod(shape):
            return ordinary(shape)
        array = whole_pages(shape)
        self._lock(array)
        return array

    def _lock(self, array: np.ndarray) -> None:
        address = array.ctypes.data
        with torch.cuda.device(self._device):  # a thread begins on GPU 0, and would open a context there
            status = int(torch.cuda.cudart().cudaHostRegister(address, array.nbytes, PORTABLE))
            if not status:
                weakref.finalize(array, _unlock, address).atexit = False
                return
            with suppress(RuntimeError):  # CUDA reports an error again at the next kernel; let that be this one
                torch.zeros(1, device=self._device).add_(1)
        self._refused = True
        print(
            f"note      rows are copied from ordinary memory: {array.nbytes / 1e6:,.0f} MB could not be page-locked (CUDA error {status})",
            file=sys.stderr,
        )


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
