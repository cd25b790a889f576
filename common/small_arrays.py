"""The arrays of a part besides its states: tokens, masks, keys, rows, and every chunk's checksum. One chunk each, read whole.

Owns their shapes and how one is read without being believed: its file must have the digest that the manifest names, so that
a file of another array, another part or another time is damage even where its own checksum is right.
"""

from __future__ import annotations

import math
from pathlib import Path

import crc32c
import numpy as np

from . import layout
from .errors import CacheDamaged
from .fingerprint import digest_bytes
from .manifest import PartManifest
from .shard import CHECKSUM_BYTES
from .spec import CacheSpec


def read_small(part: Path, found: PartManifest, cache: CacheSpec, name: str) -> np.ndarray:
    """A small array straight from its only chunk, checked against the manifest's digest and its own crc32c. Read-only.

    Raises CacheDamaged naming the file.
    """
    shape, dtype = found.small_arrays(cache)[name]
    inside = layout.only_chunk(name, len(shape))
    path = part / inside
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CacheDamaged(f"cannot be read: {error.strerror}", place=str(path)) from None
    body, stored = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if len(body) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise CacheDamaged(
            "the array has another size than its manifest says", place=str(path), found=f"{len(body)} bytes", expected=f"{shape} {dtype}"
        )
    if crc32c.crc32c(body).to_bytes(CHECKSUM_BYTES, "little") != stored:
        raise CacheDamaged("the checksum does not match", place=str(path))
    if digest_bytes(data) != found.files[inside].xxh3_128:
        raise CacheDamaged("the file is whole, but it is not the one that was written here", place=str(path))
    return np.frombuffer(body, np.dtype(dtype).newbyteorder("<")).reshape(shape)
