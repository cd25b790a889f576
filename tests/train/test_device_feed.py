"""Rows on their way to a device: the same numbers, in the same order, no memory used again too early, and no more rows than said."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from rows import Document, make_batch

from dflash_cache.train.batch import Batch
from dflash_cache.train.device_feed import AHEAD, CudaCopier, DeviceRows, Wait
from dflash_cache.train.loader import RowLoader
from dflash_cache.train.page_locked import PageLocked, whole_pages
from dflash_cache.train.reader import CacheReader


class SlowBus:
    """A device that is memory, too. A copy takes its bytes late, so that one who uses its source again too early is found out."""

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds, self.copies, self.lent, self.marks = seconds, 0, 0, 0
        self.reached: list[threading.Event] = []
        """Of each mark; set: the device is there."""
        self.hold = False

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copies += 1
        half = len(tensor) // 2
        first = tensor[:half].clone()
        time.sleep(self.seconds)
        return torch.cat([first, tensor[half:]])

    def lend(self, copy: torch.Tensor) -> None:
        self.lent += 1

    def mark(self) -> Wait:
        self.reached.append(threading.Event())
        if not self.hold:
            self.reached[-1].set()
        return self.reached[-1].wait  # type: ignore[return-value]


class Known:
    """Rows of known features."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at

    def rows_per_epoch(self, epoch: int) -> int:
        return self.count

    def tokens_per_row(self, epoch: int) -> Sequence[int]:
        return [8] * self.count

    def epoch(self, epoch: int, start_row: int = 0, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        for row in range(start_row, self.count) if rows is None else rows:
            if row == self.fails_at:
                raise ValueError(f"row {row}")
            yield make_batch([Document(8, seed=100 * epoch + row)])


def loader_of(cache: Any, **options: Any) -> RowLoader:
    return RowLoader([CacheReader(cache)], **{"layer_ids": None, "row_tokens": 64, "need_verifier": True, "seed": 0, **options})


def same(one: Batch, other: Batch) -> bool:
    tensors = ("input_ids_T", "document_T", "position_T", "loss_mask_T", "next_ids_T", "next_supervised_T", "features", "verifier")
    return one.sample_ids == other.sample_ids and all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors)


def test_rows_that_pass_over_a_slow_bus_are_the_loaders_own_bit_for_bit(write_cache):
    """The loader has memory for a few rows only and fills it again as soon as it is let go."""
    cache, _, _ = write_cache(lengths=[10, 20, 30, 25, 18, 7, 33, 64] * 12, part_tokens=300)
    wanted, loader = list(loader_of(cache, buffer_bytes=1).epoch(1)), loader_of(cache, buffer_bytes=1)
    rows = DeviceRows(loader, SlowBus())
    found = list(rows.epoch(1))
    assert len(found) == len(wanted) > 20
    assert all(same(one, other) for one, other in zip(found, wanted))
    assert len({owner.ctypes.data for owner in loader._memory.free[64, 3, 8]}) < len(found) / 2  # it was used again
    assert all(same(*pair) for pair in zip(rows.epoch(1, 7), wanted[7:], strict=True))
    assert all(same(*pair) for pair in zip(rows.epoch(1, rows=[2, 5, 9]), [wanted[2], wanted[5], wanted[9]], strict=True))
    rows.close()
    loader.close()


def test_a_row_without_verifier_states_has_none_on_the_device(write_cache):
    cache, _, _ = write_cache(lengths=[64, 64])
    bus = SlowBus()
    assert [batch.verifier for batch in DeviceRows(loader_of(cache, need_verifier=False), bus).epoch(0)] == [None, None]
    assert (bus.copies, bus.lent) == (2, 2)


def test_no_row_is_copied_before_the_device_is_done_with_the_row_two_before():
    bus = SlowBus(0)
    bus.hold = True
    epoch = DeviceRows(Known(5), bus).epoch(0)
    next(epoch)
    for row in range(3):
        next(epoch)  # row + 1, which was there; asking for it says that row `row` has been used
        time.sleep(0.03)
        assert len(bus.reached) == row + 1
        assert bus.copies == 2 * (row + 1 + AHEAD)  # features and verifier states of each
        bus.reached[row].set()
    bus.hold = False
    bus.lend = lambda copy: [event.set() for event in bus.reached]  # type: ignore[method-assign, assignment]
    assert len(list(epoch)) == 1


def test_an_error_of_the_loader_comes_at_its_row_and_not_before():
    epoch = DeviceRows(Known(5, fails_at=3), SlowBus(0)).epoch(0)
    assert [next(epoch).sample_ids for _ in range(3)] == [((0, 0),)] * 3
    with pytest.raises(ValueError, match="row 3"):
        next(epoch)
    assert next(epoch, None) is None


def test_an_error_of_the_copy_reaches_the_consumer():
    bus = SlowBus()
    bus.copy = lambda tensor: torch.empty(-1)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="negative"):
        next(DeviceRows(Known(2), bus).epoch(0))


def test_an_epoch_that_is_left_leaves_no_thread_and_one_that_was_never_begun_starts_none():
    def feeding() -> int:
        return sum(thread.name == "dflash-device-feed" for thread in threading.enumerate())

    rows = DeviceRows(Known(50), SlowBus(0))
    idle = rows.epoch(0)
    for _ in range(3):
        next(iter(rows.epoch(0)))
    assert feeding() == 0
    left = rows.epoch(0)
    next(left)
    assert feeding() == 1
    rows.close()
    assert feeding() == 0
    assert len(list(left)) <= AHEAD
    assert list(idle) == []


def test_two_epochs_side_by_side_do_not_mix():
    rows = DeviceRows(Known(5), SlowBus(0.001))
    wanted = [list(Known(5).epoch(0)), list(Known(5).epoch(1))]
    for pair, right in zip(zip(rows.epoch(0), rows.epoch(1), strict=True), zip(*wanted, strict=True), strict=True):
        assert all(same(*both) for both in zip(pair, right))


def test_memory_to_be_locked_starts_and_ends_on_pages_of_its_own_and_can_be_filled():
    first, second = whole_pages((3, 5)), whole_pages((1000, 3, 7))
    for array in (first, second):
        assert array.dtype == np.uint16
        assert array.ctypes.data % mmap.PAGESIZE == 0
        assert not array.any()
        array[...] = 7
    assert abs(first.ctypes.data - second.ctypes.data) >= mmap.PAGESIZE
    assert int(second.sum()) == 7 * 21000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_rows_arrive_bit_for_bit_while_it_works(write_cache):
    """The device is kept busy and memory for few rows is filled again and again; then what a refused lock leaves behind."""
    cache, _, _ = write_cache(lengths=[10, 20, 30, 25, 18, 7, 33, 64] * 40, part_tokens=3000)
    device = torch.device("cuda", torch.cuda.current_device())
    wanted = list(loader_of(cache, buffer_bytes=1).epoch(0))
    memory = PageLocked(device)
    loader = loader_of(cache, buffer_bytes=1, allocate=memory)
    rows, product = DeviceRows(loader, CudaCopier(device)), torch.randn(2048, 2048, device=device)
    sums = []
    for batch in rows.epoch(0):
        for _ in range(5):
            product = (product @ product).clamp(-1, 1)
        assert batch.features.device == device
        sums.append((batch.features.clone(), batch.verifier_rows(torch.arange(64), device)))
    for (features, verifier), right in zip(sums, wanted, strict=True):
        assert torch.equal(features.cpu(), right.features)
        assert torch.equal(verifier.cpu(), right.verifier)
    rows.close()
    loader.close()
    array = memory((1 << 20,))
    assert torch.from_numpy(array).is_pinned()
    memory._lock(array)  # locked already: refused
    assert memory._refused
    assert int(torch.ones(3, device=device).sum()) == 3
    assert not torch.from_numpy(memory((8,))).is_pinned()
