"""Which samples an epoch reads: those that are held out never, those of a weighted cache more or less often than once.

In: readers, the caches' weights, the share to hold out. Out: the samples of an epoch and those held out. Pure apart from
reading the samples' keys; no torch.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np
import xxhash

from ..common.errors import InputError
from .reader import CacheReader

KEY_BYTES = 16
CHOICE_SEED = 0x5EED
"""Tells the choice among a weighted cache's samples from the other things that (seed, epoch) decides."""


def held_out(reader: CacheReader, fraction: float) -> np.ndarray:
    """bool [S]: the samples that are not trained on. A hash of the sample's key decides, so that neither the order of
    caches and samples nor anything else in them matters: a text that is in two caches is held out of both or of neither."""
    if not fraction:
        return np.zeros(reader.num_samples, bool)
    return key_hashes(reader) < np.uint64(min(int(fraction * 2**64), 2**64 - 1))


def key_hashes(reader: CacheReader) -> np.ndarray:
    """uint64 [S]: xxh3-64 of each sample's key. Kept as long as the reader: ten million take seconds."""
    if reader not in _hashes:
        keys = (bytes(column.data) for column in reader.columns("sample_key"))
        digests = (xxhash.xxh3_64_intdigest(part[at : at + KEY_BYTES]) for part in keys for at in range(0, len(part), KEY_BYTES))
        _hashes[reader] = np.fromiter(digests, np.uint64, reader.num_samples)
    return _hashes[reader]


def pick(readers: Sequence[CacheReader], allowed: Sequence[np.ndarray], limit: int) -> np.ndarray:
    """bool [samples of all readers]: at most `limit` of the `allowed` ones (bool [S] of each reader), those of lowest hash."""
    hashes, allowed_S = np.concatenate([key_hashes(reader) for reader in readers]), np.concatenate(allowed)
    candidates = np.flatnonzero(allowed_S)
    picked = np.zeros(len(hashes), bool)
    picked[candidates[np.argsort(hashes[candidates], kind="stable")[:limit]]] = True
    return picked


_hashes: weakref.WeakKeyDictionary[CacheReader, np.ndarray] = weakref.WeakKeyDictionary()


class EpochSamples:
    """The samples of each epoch of a run. A cache of weight 2.5 stands three times in `readers`; half of its last copy is read.

    weights: of each cache, None: 1 each. held: bool [S] of each cache, never read. Raises InputError when the weights are not
    one for each cache, or nothing is left.
    """

    def __init__(self, readers: Sequence[CacheReader], weights: Sequence[float] | None, held: Sequence[np.ndarray], seed: int) -> None:
        if weights is not None and len(weights) != len(readers):
            found = f"{len(weights)} weights, {len(readers)} caches"
            raise InputError("needs one weight for each --cache, in their order", place="data.weights", found=found)
        copies = [math.ceil(weight) for weight in (weights or [1.0] * len(readers))]
        self._seed = seed
        self.numbers = tuple(number for number, count in enumerate(copies) for _ in range(count))
        """The cache's number of each of `readers`."""
        self.readers = tuple(readers[number] for number in self.numbers)
        """Each cache as often as an epoch begins to read it."""
        self._weights = tuple(min(weight - copy, 1.0) for weight, count in zip(weights or copies, copies) for copy in range(count))
        self._free = [np.flatnonzero(~held[number]) for number in self.numbers]
        if not sum(map(len, self._free)):
            raise InputError("no sample is left to train on", place="data.eval_fraction, data.weights", fix="hold out fewer")

    def chosen(self, epoch: int) -> np.ndarray:
        """bool [samples of all `readers`]: what `epoch` reads. Of a fractional copy another seeded choice each epoch."""
        parts = []
        for copy, (reader, weight, free) in enumerate(zip(self.readers, self._weights, self._free)):
            part = np.zeros(reader.num_samples, bool)
            if weight < 1:
                drawn = np.random.default_rng((CHOICE_SEED, self._seed, epoch, copy)).permutation(len(free))
                free = free[drawn[: max(round(weight * len(free)), 1)]]
            part[free] = True
            parts.append(part)
        return np.concatenate(parts)
