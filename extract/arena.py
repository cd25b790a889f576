"""Arena: which ranges of one block of memory are in use. Memory that is costly to get (page-locked) is got once and reused.

Owns offsets, not memory. First fit; ranges may be given back in any order, from any thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort

ALIGNMENT = 4096
"""Bytes. Ranges begin on a page."""


class Arena:
    """`capacity` bytes, of which none are in use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ranges: list[tuple[int, int]] = []  # (start, end), sorted, none overlapping
        self._lock = threading.Lock()

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes that are the caller's until `give_back`; None while there is no such gap."""
        with self._lock:
            start = 0
            for used_start, used_end in self._ranges:
                if used_start - start >= size:
                    break
                start = used_end
            if start + size > self.capacity:
                return None
            end = start + max(1, -(-size // ALIGNMENT)) * ALIGNMENT
            insort(self._ranges, (start, end))
            return start

    def give_back(self, offset: int) -> None:
        """The range that `take` gave at `offset` may be given to others."""
        with self._lock:
            index = bisect_left(self._ranges, (offset,))
            assert self._ranges[index][0] == offset
            del self._ranges[index]

    @property
    def used(self) -> int:
        """Ranges in use."""
        with self._lock:
            return len(self._ranges)
