"""The key of a sample: 16 bytes that stand for what is fed to the target, so that no sample is stored twice."""

from __future__ import annotations

import hashlib

import numpy as np


def sample_key(input_ids: np.ndarray, rest: bytes) -> bytes:
    """Of ids (int [T]) and what else there is: the mask, or the word `generate` and what is asked after the first answer."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.ascontiguousarray(input_ids, np.int32).tobytes())
    digest.update(b"\0")
    digest.update(rest)
    return digest.digest()
