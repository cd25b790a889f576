"""One shard file: chunks in order, each with its crc32c, then the index with a crc32c of its own.

This is the layout of Zarr v3's sharding codec (index at the end, little endian), so any Zarr v3 reader opens it; the file
is written here, chunk by chunk, because a whole-shard write through a library needs the whole shard in memory.
Knows nothing of planes, layers or parts.  Source: zarr-specs, `sharding_indexed` 1.0 and `crc32c` 1.0.
"""

from __future__ import annotations

import errno
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import crc32c
import numpy as np
import xxhash

from .errors import CacheDamaged, RunFailed

CHECKSUM_BYTES = 4
INDEX_ENTRY_BYTES = 16
_ABSENT = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class FileRecord:
    """What is known of a finished shard file."""

    size: int
    """Bytes."""
    xxh3_128: str
    """Hex digest."""
    checksums: tuple[int, ...]
    """crc32c of each chunk, in order."""


class ShardWriter:
    """Appends encoded chunks to one shard file. Not thread-safe. Raises OSError as the file system does."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115 - closed in close() or abandon()
        self._digest = xxhash.xxh3_128()
        self._index: list[tuple[int, int]] = []
        self._checksums: list[int] = []
        self._position = 0

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._position

    def append(self, chunk: bytes | memoryview | np.ndarray) -> None:
        """Append one encoded chunk (without checksum); its crc32c is added here."""
        start = self._position
        self._write(chunk)
        self._checksums.append(crc32c.crc32c(chunk))
        self._write(struct.pack("<I", self._checksums[-1]))
        self._index.append((start, self._position - start))

    def close(self) -> FileRecord:
        """Write the index and return what is known of the file. Not yet durable: publishing makes the whole part so at once."""
        index = np.asarray(self._index, "<u8").tobytes()
        self._write(index)
        self._write(struct.pack("<I", crc32c.crc32c(index)))
        self._file.close()
        return FileRecord(self._position, self._digest.hexdigest(), tuple(self._checksums))

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
    index_bytes = num_chunks * INDEX_ENTRY_BYTES
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


def checked_chunk(data: memoryview, offset: int, size: int, wanted: int, place: str) -> memoryview:
    """The encoded chunk at `offset` without its checksum, after checking it.

    wanted: the crc32c that the part's own list has for it; a whole chunk of another place has another. Raises CacheDamaged
    naming `place`.
    """
    chunk = data[offset : offset + size - CHECKSUM_BYTES]
    stored = struct.unpack("<I", data[offset + size - CHECKSUM_BYTES : offset + size])[0]
    if crc32c.crc32c(chunk) != stored:
        raise CacheDamaged("the checksum of the chunk does not match", place=place)
    if stored != wanted:
        raise CacheDamaged("the chunk is whole, but it is not the one that was written here", place=place)
    return chunk


def zstd_content_bytes(frame: memoryview) -> int | None:
    """The size that a zstd frame says its content has; None when it says none or is no frame.

    The decoder fills a larger buffer only so far and does not tell, so this is asked first. Source: RFC 8878, 3.1.1.
    """
    head = bytes(frame[:18]).ljust(18, b"\0")
    if head[:4] != b"\x28\xb5\x2f\xfd":
        return None
    descriptor = head[4]
    single_segment, kind = descriptor >> 5 & 1, descriptor >> 6
    start = 5 + (0 if single_segment else 1) + (0, 1, 2, 4)[descriptor & 3]
    width = (1 if single_segment else 0, 2, 4, 8)[kind]
    value = int.from_bytes(head[start : start + width], "little")
    return None if width == 0 else value + (256 if width == 2 else 0)


def map_file(path: Path) -> memoryview:
    """A read-only memory map of a file. Raises CacheDamaged when it is missing or empty, RunFailed when it cannot be opened."""
    try:
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise CacheDamaged("the file is missing", place=str(path)) from None
    except ValueError:
        raise CacheDamaged("the file is empty", place=str(path)) from None
    except OSError as error:
        fix = "raise the limit (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        raise RunFailed(f"the file cannot be opened: {error.strerror}", place=str(path), fix=fix) from None
