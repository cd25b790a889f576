"""One shard file: chunks in order, each with its crc32c, then the index with a crc32c of its own.

This is the layout of Zarr v3's sharding codec (index at the end, little endian), so any Zarr v3 reader opens it; the file
is written here, chunk by chunk, because a whole-shard write through a library needs the whole shard in memory.
Knows nothing of planes, layers or parts.  Source: zarr-specs, `sharding_indexed` 1.0 and `crc32c` 1.0.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import crc32c
import numpy as np
import xxhash

from .errors import CacheDamaged

CHECKSUM_BYTES = 4
_ABSENT = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and xxh3-128 (hex) of a finished file."""

    size: int
    xxh3_128: str


class ShardWriter:
    """Appends encoded chunks to one shard file. Not thread-safe. Raises OSError as the file system does."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115 - closed in close() or abandon()
        self._digest = xxhash.xxh3_128()
        self._index: list[tuple[int, int]] = []
        self._position = 0

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._position

    def append(self, chunk: bytes | memoryview | np.ndarray) -> None:
        """Append one encoded chunk (without checksum); its crc32c is added here."""
        start = self._position
        self._write(chunk)
        self._write(struct.pack("<I", crc32c.crc32c(chunk)))
        self._index.append((start, self._position - start))

    def close(self) -> FileRecord:
        """Write the index, make the file durable and return its size and digest."""
        index = np.asarray(self._index, "<u8").tobytes()
        self._write(index)
        self._write(struct.pack("<I", crc32c.crc32c(index)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._position, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close without an index; the file is not a shard and is to be deleted."""
        try:
            self._file.close()
        except OSError:  # buffered bytes that do not fit any more
            pass

    def _write(self, data: bytes | memoryview | np.ndarray) -> None:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # an array is a buffer; numpy before 2.2 does not say so
        self._file.write(view)
        self._digest.update(view)
        self._position += len(view)


def read_index(data: memoryview, num_chunks: int, place: str) -> np.ndarray:
    """Offsets and sizes, uint64 [num_chunks, 2], of the chunks of the shard in `data`.

    Raises CacheDamaged when the index's checksum fails, a chunk is absent (Zarr would read it as zeros) or the chunks do
    not fill the file from its first byte to the index, each after the other.
    """
    index_bytes = num_chunks * 16
    body = len(data) - index_bytes - CHECKSUM_BYTES
    if body < 0:
        raise CacheDamaged(
            "the file is shorter than its own index", place=place, found=f"{len(data)} bytes", expected=f"at least {index_bytes + CHECKSUM_BYTES}"
        )
    raw = data[body : body + index_bytes]
    if crc32c.crc32c(raw) != struct.unpack("<I", data[body + index_bytes :])[0]:
        raise CacheDamaged("the checksum of the shard index does not match", place=place)
    index = np.frombuffer(raw, "<u8").reshape(num_chunks, 2)
    if (index == _ABSENT).any():
        raise CacheDamaged("chunks are absent; every chunk must be present", place=place, found=np.flatnonzero((index == _ABSENT).any(1)).tolist())
    starts = np.concatenate([[0], np.cumsum(index[:, 1])]).astype(np.uint64)
    if not np.array_equal(starts[:-1], index[:, 0]) or int(starts[-1]) != body or (num_chunks and int(index[:, 1].min()) <= CHECKSUM_BYTES):
        raise CacheDamaged("the chunks do not fill the shard", place=place)
    return index


def checked_chunk(data: memoryview, offset: int, size: int, place: str) -> memoryview:
    """The encoded chunk at `offset` without its checksum, after checking it. Raises CacheDamaged naming `place`."""
    chunk = data[offset : offset + size - CHECKSUM_BYTES]
    stored = struct.unpack("<I", data[offset + size - CHECKSUM_BYTES : offset + size])[0]
    if crc32c.crc32c(chunk) != stored:
        raise CacheDamaged(
            "the checksum of the chunk does not match", place=place, fix="run `dflash verify` on the cache; extract the damaged part again"
        )
    return chunk


def map_file(path: Path) -> memoryview:
    """A read-only memory map of a file. Raises CacheDamaged when it is missing or empty."""
    try:
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise CacheDamaged("the file is missing", place=str(path)) from None
    except ValueError:
        raise CacheDamaged("the file is empty", place=str(path)) from None
