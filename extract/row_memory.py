"""RowMemory: host memory for rows that two processes share, so that the one that computes hands rows over without copying them.

Got once. The engine's process sees it as a tensor, page-locked for a GPU in place; the writing process maps the same pages by the
file descriptor that it inherits. It has no name, so that nothing of it is left when both have ended, however they died. Knows nothing
of what lies where in it.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

PORTABLE = 1
"""cudaHostRegisterPortable: locked for every GPU's context, whichever is current."""


class RowMemory:
    """`nbytes` bytes. `fd` is what another process needs for `attach`."""

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        """device: a GPU that copies rows into it by itself; None for one that does not."""
        import torch  # here only: the writing process attaches without it, and starts seconds earlier

        self.nbytes = nbytes
        self.fd = os.memfd_create("dflash-rows", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, nbytes)
        self.tensor = torch.frombuffer(_map(self.fd, nbytes), dtype=torch.uint8)
        """uint8 [nbytes]."""
        if device is not None:
            _lock(self, device)


def attach(fd: int, nbytes: int) -> np.ndarray:
    """The memory of another process, uint8 [nbytes]."""
    return np.frombuffer(_map(fd, nbytes), np.uint8)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _lock(memory: RowMemory, device: torch.device) -> None:
    """Lock its pages. Where the system refuses, it stays ordinary memory, into which copies are right but slower; that is said once."""
    import torch

    address = memory.tensor.data_ptr()
    with torch.cuda.device(device):
        status = int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, PORTABLE))
        if not status:
            weakref.finalize(memory, _unlock, address).atexit = False
            return
        with suppress(RuntimeError):  # CUDA reports an error again at the next kernel; let that be this one
            torch.zeros(1, device=device).add_(1)
    print(
        f"note      rows are copied into ordinary memory: {memory.nbytes / 1e6:,.0f} MB could not be page-locked (CUDA error {status})",
        file=sys.stderr,
    )


def _unlock(address: int) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)
