"""DeviceRows: a loader's rows, their states already on the GPU when they are asked for.

In: a loader, and what copies tensors to the device. Out: the same Batches with features and verifier states on the device; all
else of them stays on the CPU, where anchors and labels are made. A thread takes the rows from the loader and copies one while
the step before works, so that neither the merge nor the copy takes time of the training thread. Changes no number.

A row's host memory is let go only when its last byte has arrived, since the loader fills it anew. Device memory is PyTorch's own:
a copy lives as long as somebody holds it, and a row is copied only when the device has done all that was asked of the row two before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol

import torch

from .batch import Batch
from .loader import RowLoader
from .work import Rows

AHEAD = 1
"""Rows on the device besides the one in use. With the one that is just being let go there are at most three."""
Wait = Callable[[], None]


class Copier(Protocol):
    """How tensors get to a device."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same on the device. Returns when all of it is there; `tensor` may be overwritten from then on. Feeding thread."""
        ...

    def lend(self, copy: torch.Tensor) -> None:
        """The caller will use this copy from now on. Consumer's thread."""
        ...

    def mark(self) -> Wait:
        """A mark behind all that the caller has asked of the device; what is returned waits for it. Consumer's thread."""
        ...


class CudaCopier:
    """Copies on a stream of its own, from page-locked memory if the transfer is to run beside other work."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Made and filled on the stream of copies; the thread sleeps meanwhile."""
        with torch.cuda.stream(self._stream):
            there = torch.empty_like(tensor, device=self._device)
            there.copy_(tensor, non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(self._stream)
        arrived.synchronize()
        return there

    def lend(self, copy: torch.Tensor) -> None:
        """Its memory was made for the stream of copies; the allocator must know that the consumer's stream uses it too."""
        copy.record_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> Wait:
        """An event on the consumer's stream."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


class DeviceRows:
    """`rows` with their states on a device. Each epoch that is being read has a thread; `close` ends them."""

    def __init__(self, rows: Rows, copier: Copier) -> None:
        self._rows, self._copier = rows, copier
        self._feeds: weakref.WeakSet[_Feed] = weakref.WeakSet()

    def rows_per_epoch(self, epoch: int) -> int:
        """Rows of an epoch."""
        return self._rows.rows_per_epoch(epoch)

    def tokens_per_row(self, epoch: int) -> Sequence[int]:
        """Tokens of each row of an epoch, padding aside."""
        return self._rows.tokens_per_row(epoch)

    def epoch(self, epoch: int, start_row: int = 0, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """As the loader's. Raises what the loader raises, at the row where it does."""
        feed = _Feed(self._rows.epoch(epoch, start_row, rows), self._copier)
        self._feeds.add(feed)
        return feed.batches()

    def close(self) -> None:
        """Stop reading ahead. To be called before the loader is closed."""
        for feed in list(self._feeds):
            feed.stop()


class _Feed:
    """One pass over an epoch's rows. Nothing is read before the first is asked for."""

    def __init__(self, source: Iterator[Batch], copier: Copier) -> None:
        self._source, self._copier = source, copier
        self._ready: SimpleQueue[Batch | BaseException | None] = SimpleQueue()
        self._free: SimpleQueue[Wait | None] = SimpleQueue()  # one entry for each row that may be on the device
        self._stopped = False
        self._thread = threading.Thread(target=self._fill, name="dflash-device-feed", daemon=True)

    def batches(self) -> Iterator[Batch]:
        for _ in range(1 + AHEAD):
            self._free.put(_nothing)
        self._thread.start()
        try:
            while (batch := self._ready.get()) is not None:
                if isinstance(batch, BaseException):
                    raise batch
                for tensor in _states(batch):
                    self._copier.lend(tensor)
                del tensor
                yield batch
                del batch  # or it would live until the next has come
                self._free.put(self._copier.mark())
        finally:
            self.stop()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped = True
        self._free.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self._ready.put(None)

    def _fill(self) -> None:
        try:
            while not self._stopped and (batch := next(self._source, None)) is not None:
                wait = self._free.get()
                if wait is None or self._stopped:
                    break
                wait()
                moved = replace(batch, features=self._copier.copy(batch.features), verifier=self._copied(batch.verifier))
                self._ready.put(moved)
                del batch, moved  # the loader may use its memory again
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def _copied(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else self._copier.copy(tensor)


@contextmanager
def fed(loader: RowLoader, device: torch.device) -> Iterator[Rows]:
    """The loader's rows, with their states on `device` where that is a GPU. Closes the loader at the end."""
    ready = DeviceRows(loader, CudaCopier(device)) if device.type == "cuda" else None
    try:
        yield ready or loader
    finally:
        if ready is not None:
            ready.close()  # first: its threads wait for the loader's
        loader.close()


def _states(batch: Batch) -> list[torch.Tensor]:
    return [tensor for tensor in (batch.features, batch.verifier) if tensor is not None]


def _nothing() -> None:
    """No wait."""
