"""ChunkEncoder: full chunks of rows in, encoded chunks in the shards of their part.

Owns the chunks in memory (one that is filled and a few that are being encoded) and the threads. Every layer of every chunk is a
task of its own; each shard gets its chunks in their order, whichever thread comes first, so the bytes do not depend on the number
of threads. Knows nothing of samples, parts or when to publish.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
from numcodecs import zstd

from ..common import layout, planes
from ..common.shard import ShardWriter
from ..common.spec import CacheSpec

ZSTD_LEVEL = 1
MAX_THREADS = 12
"""Enough for 7 GB of raw states a second; more would take cores that tokenizing and the engine need."""
_buffers = threading.local()


def default_threads() -> int:
    """Threads that encode: all cores that this process may use but two, one for the engine and one for copying; at most 12."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) - 2))


@dataclass
class Lane:
    """The two shards of one layer, and what waits for its turn to go into them."""

    exponent: ShardWriter
    sign_mantissa: ShardWriter
    mantissa_bits: int
    next_chunk: int = 0
    ready: dict[int, tuple[bytes, np.ndarray]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def append(self, number: int, exponent: bytes, sign_mantissa: np.ndarray) -> None:
        """Write chunk `number`, now or as soon as those before it are written. Whoever has the next one writes all that follow."""
        with self.lock:
            if number != self.next_chunk:
                self.ready[number] = exponent, sign_mantissa.copy()  # the buffer is its thread's
                return
            while True:
                self.exponent.append(exponent)
                self.sign_mantissa.append(sign_mantissa)
                self.next_chunk += 1
                if self.next_chunk not in self.ready:
                    return
                exponent, sign_mantissa = self.ready.pop(self.next_chunk)


class ChunkEncoder:
    """Fill `rows`, then `flush`. One thread calls it. Raises OSError as the file system does; then it is to be closed."""

    def __init__(self, spec: CacheSpec, shards: Mapping[str, ShardWriter], threads: int, ahead: int) -> None:
        """shards: by path. threads: 1 encodes in `flush` itself. ahead: chunks that may still be encoded when `flush` returns."""
        layers, width, chunk = len(spec.layer_ids), spec.hidden_size, spec.limits.chunk_tokens
        self._shape = (layers + 1, chunk, width)
        self.rows = np.zeros(self._shape, np.uint16)
        """uint16 [L + 1, tokens of a chunk, H], the verifier's last: to be filled. Another array after each `flush`."""
        self._free: list[np.ndarray] = []
        self._in_flight: deque[tuple[list[Future[None]], np.ndarray]] = deque()
        self._ahead = ahead if threads > 1 else 0
        self._count = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cache-encode") if threads > 1 else None
        slots: list[tuple[str, int | None, int]] = [(layout.HIDDEN_STATES, slot, spec.mantissa_bits) for slot in range(layers)]
        slots.append((layout.VERIFIER, None, planes.LOSSLESS_BITS))
        self._lanes = [
            Lane(shards[layout.shard_path(array, layout.EXPONENT, slot)], shards[layout.shard_path(array, layout.SIGN_MANTISSA, slot)], bits)
            for array, slot, bits in slots
        ]

    def flush(self) -> None:
        """Encode what `rows` holds as the next chunk. Waits while more than `ahead` chunks are in work."""
        number, rows = self._count, self.rows
        self._count += 1
        if self._pool is None:
            for layer in range(len(self._lanes)):
                self._encode(number, layer, rows)
            return
        self._in_flight.append(([self._pool.submit(self._encode, number, layer, rows) for layer in range(len(self._lanes))], rows))
        self._wait(self._ahead)
        self.rows = self._free.pop() if self._free else np.zeros(self._shape, np.uint16)

    def finish(self) -> None:
        """Wait for all that is in work, and let the threads go."""
        self._wait(0)
        self.close()

    def close(self) -> None:
        """Let the threads end, whatever has happened; none writes on afterwards. Harmless when called twice."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _wait(self, most: int) -> None:
        while len(self._in_flight) > most:
            done, rows = self._in_flight.popleft()
            wait(done)
            for future in done:
                future.result()
            self._free.append(rows)

    def _encode(self, number: int, layer: int, rows: np.ndarray) -> None:
        lane = self._lanes[layer]
        exponent, sign_mantissa = _planes_of(rows[layer].shape, lane.mantissa_bits)
        planes.encode_into(rows[layer], lane.mantissa_bits, exponent, sign_mantissa)
        lane.append(number, zstd.compress(exponent, ZSTD_LEVEL), sign_mantissa)


def _planes_of(shape: tuple[int, ...], mantissa_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """This thread's two planes for a chunk, reused: new memory for each would cost more than filling it."""
    if getattr(_buffers, "shape", None) != shape:
        _buffers.shape = shape
        _buffers.planes = {
            bits: tuple(np.empty((shape[0], width), np.uint8) for width in (shape[1], shape[1] if bits == planes.LOSSLESS_BITS else shape[1] // 2))
            for bits in (planes.LOSSLESS_BITS, planes.PACKED_BITS)
        }
    exponent, sign_mantissa = _buffers.planes[mantissa_bits]
    return exponent, sign_mantissa
