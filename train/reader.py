"""CacheReader: a cache's index in memory, and its states read from memory-mapped shard files.

In: a cache folder. Out: Samples, or the bfloat16 patterns of runs of rows, put where the caller wants them. Owns finding
chunks by the shard's own index, checking each chunk's crc32c on first touch, and decoding: the mantissa is read from the
map, the exponent from a scratch buffer, and one pass merges them into place. Knows nothing of order, packing or tensors.
"""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import zstd

from ..common import layout, manifest, planes, spec
from ..common.errors import CacheDamaged, InputError
from ..common.manifest import PartManifest
from ..common.sample import Sample
from ..common.shard import CHECKSUM_BYTES, checked_chunk, map_file, read_index, zstd_content_bytes
from ..common.small_arrays import read_small
from ..common.spec import CacheSpec

MAX_OPEN_SHARDS = 128
"""Shard files mapped at once by a reader. Each map holds a file handle, and the usual limit is 1,024 a process."""
SHARE_OF_HANDLES = 8
"""A reader takes at most one of so many file handles that the process may have."""
SHARE_OF_ALL = 2
"""All readers together take at most one of so many: each of n at most limit / (2 n), for somebody else opens files too."""
SCAN_THREADS, SCAN_AHEAD = 8, 16
"""Threads that read the small arrays of all parts, and parts that they are ahead of their reader: a disk far away answers late."""
MAX_SMALL_BYTES = 256 << 20
"""Small arrays kept in memory, bytes. A token's id and mask are 5 bytes, so that those of a large cache do not all fit."""


Piece = tuple[int, np.ndarray]
"""Rows of a chunk and their destination: (first row within the chunk, uint16 [n, H] to fill; a strided view will do)."""


@dataclass(frozen=True)
class Part:
    """One published part and its small arrays."""

    path: Path
    manifest: PartManifest
    offsets: np.ndarray
    """int64 [S + 1]: rows of sample i are offsets[i]:offsets[i + 1]."""


class CacheReader:
    """Reads one cache. Threads may share it.

    Raises InputError for a folder that is no cache, CacheDamaged (naming part, file and chunk) for anything that is not as
    written; damaged rows are never returned.
    """

    def __init__(self, path: Path) -> None:
        cache = spec.load(path)
        parts = []
        for folder in manifest.list_parts(path):
            found = manifest.load(folder, cache)
            parts.append(Part(folder, found, _offsets(folder, found, cache)))
        if not parts:
            raise InputError("holds no samples yet", place=str(path), expected="at least one published part", fix="run `dflash extract` to its end")
        self._index(path, cache, parts)

    @classmethod
    def of_part(cls, part: Path, found: PartManifest, cache: CacheSpec, offsets: np.ndarray | None = None) -> CacheReader:
        """A reader of one part alone, whose manifest has been checked. `offsets` stand in for those of a damaged part."""
        reader = cls.__new__(cls)
        reader._index(part.parent.parent, cache, [Part(part, found, _offsets(part, found, cache) if offsets is None else offsets)])
        return reader

    def _index(self, path: Path, cache: CacheSpec, parts: list[Part]) -> None:
        self.path, self.spec, self.parts = path, cache, parts
        counts = [part.manifest.samples for part in self.parts]
        self.part_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        """int32 [S]: index into `parts` of each sample."""
        self.starts = np.concatenate([part.offsets[:-1] for part in self.parts])
        """int64 [S]: first row of each sample within its part."""
        self.lengths = np.concatenate([np.diff(part.offsets) for part in self.parts])
        """int64 [S]: tokens of each sample."""
        self._first_sample = np.concatenate([[0], np.cumsum(counts)])
        self._shards: OrderedDict[tuple[int, int], _Shard] = OrderedDict()
        self._lock = threading.Lock()
        handles = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_open = max(1, min(MAX_OPEN_SHARDS, handles // SHARE_OF_HANDLES))
        self._max_together = handles // SHARE_OF_ALL
        _readers.add(self)
        self._small: OrderedDict[tuple[int, str], np.ndarray] = OrderedDict()
        self._small_bytes = 0

    @property
    def num_samples(self) -> int:
        """Samples in all parts."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens in all parts."""
        return int(self.lengths.sum())

    def read_states(self, part: int, start: int, stop: int, array: str, slots: tuple[int, ...]) -> np.ndarray:
        """Rows start:stop of a part: uint16 bfloat16 patterns [n, K, H]. `slots` index the layer axis; (0,) for the verifier's."""
        found = self.parts[part].manifest
        assert 0 <= start < stop <= found.tokens, (start, stop, found.tokens)
        out = np.empty((stop - start, len(slots), self.spec.hidden_size), np.uint16)
        chunk = found.chunk_tokens
        for number in range(start // chunk, -(-stop // chunk)):
            first, last = max(start, number * chunk), min(stop, (number + 1) * chunk)
            for index, slot in enumerate(slots):
                self.fill(part, number, array, slot, [(first - number * chunk, out[first - start : last - start, index])])
        return out

    def fill(self, part: int, chunk: int, array: str, slot: int, pieces: Sequence[Piece]) -> None:
        """Decode one chunk of one layer and put rows of it where `pieces` say. Raises CacheDamaged before anything of it is put."""
        rows, bits = self.parts[part].manifest.chunk_tokens, self._bits(array)
        exponents = self._shard(part, array, layout.EXPONENT, slot)
        mantissas = self._shard(part, array, layout.SIGN_MANTISSA, slot)
        low = mantissas.stored(chunk, rows * self.spec.hidden_size * (bits + 1) // 8).reshape(rows, -1)
        high = exponents.decompressed(chunk, rows * self.spec.hidden_size).reshape(rows, -1)
        for first, out in pieces:
            here = slice(first, first + len(out))
            planes.merge_into(high[here], low[here], bits, out)

    def read_sample(self, sample: int) -> Sample:
        """One sample, exactly as it was written."""
        part = int(self.part_of[sample])
        start, stop = int(self.starts[sample]), int(self.starts[sample] + self.lengths[sample])
        states = self.read_states(part, start, stop, layout.HIDDEN_STATES, tuple(range(len(self.spec.layer_ids))))
        verifier = self.read_states(part, start, stop, layout.VERIFIER, (0,))
        return Sample(
            key=self.column(part, "sample_key")[self._within(sample)].tobytes(),
            source=self.source(sample),
            source_row=int(self.column(part, "source_row")[self._within(sample)]),
            input_ids=self.tokens(sample, "input_ids"),
            loss_mask=self.tokens(sample, "loss_mask"),
            hidden_states=states,
            verifier_last_hidden_states=verifier[:, 0],
            engine_top1=int(self.column(part, "engine_top1")[self._within(sample)]),
            next_token=self.next_token(sample),
        )

    def column(self, part: int, name: str) -> np.ndarray:
        """A small array of a part, read-only; its digest is tested whenever it is read from disk."""
        key = (part, name)
        with self._lock:
            if (kept := self._small.get(key)) is not None:
                self._small.move_to_end(key)
                return kept
        values = read_small(self.parts[part].path, self.parts[part].manifest, self.spec, name)
        with self._lock:
            if key not in self._small:
                self._small[key] = values
                self._small_bytes += values.nbytes
            while self._small_bytes > MAX_SMALL_BYTES and len(self._small) > 1:
                self._small_bytes -= self._small.popitem(last=False)[1].nbytes
        return values

    def columns(self, *names: str) -> Iterator[Any]:
        """Of every part in order, the small array of that name, or a tuple of several; read ahead by threads and not kept."""

        def read(part: Part) -> Any:
            found = tuple(read_small(part.path, part.manifest, self.spec, name) for name in names)
            return found if len(names) > 1 else found[0]

        with ThreadPoolExecutor(min(SCAN_THREADS, len(os.sched_getaffinity(0)))) as threads:
            ahead: deque[Future[Any]] = deque()
            for part in self.parts:
                ahead.append(threads.submit(read, part))
                if len(ahead) > SCAN_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def tokens(self, sample: int, name: str) -> np.ndarray:
        """`input_ids` or `loss_mask` of one sample."""
        start = int(self.starts[sample])
        return self.column(int(self.part_of[sample]), name)[start : start + int(self.lengths[sample])]

    def next_token(self, sample: int) -> int:
        """The token known to follow the sample's last row, else NO_TOKEN."""
        return int(self.column(int(self.part_of[sample]), "next_token")[self._within(sample)])

    def source(self, sample: int) -> str:
        """The dataset that a sample came from."""
        part = int(self.part_of[sample])
        sources, index = self.parts[part].manifest.sources, int(self.column(part, "source_index")[self._within(sample)])
        if not 0 <= index < len(sources):
            raise CacheDamaged(
                "a value lies out of range", place=str(self.parts[part].path / "source_index"), found=index, expected=f"0..{len(sources) - 1}"
            )
        return sources[index]

    def token_counts(self) -> np.ndarray:
        """int64 [vocab_size]: how often each token occurs, next tokens included."""
        size = self.spec.settings.target.vocab_size
        total = np.zeros(size, np.int64)
        for part, (ids, following) in enumerate(self.columns("input_ids", "next_token")):
            if ids.min() < 0 or ids.max() >= size or following.max() >= size:
                raise CacheDamaged(
                    "a token id lies outside the vocabulary", place=str(self.parts[part].path / "input_ids"), expected=f"0..{size - 1}"
                )
            total += np.bincount(np.concatenate([ids, following[following >= 0]]), minlength=size)
        return total

    def _within(self, sample: int) -> int:
        return int(sample - self._first_sample[self.part_of[sample]])

    def _bits(self, array: str) -> int:
        return self.spec.mantissa_bits if array == layout.HIDDEN_STATES else planes.LOSSLESS_BITS

    def _shard(self, part: int, array: str, plane: str, slot: int) -> _Shard:
        verifier = array == layout.VERIFIER
        row = (len(self.spec.layer_ids) if verifier else slot) * len(layout.PLANES) + layout.PLANES.index(plane)
        key = (part, row)
        with self._lock:
            if (shard := self._shards.get(key)) is not None:
                self._shards.move_to_end(key)
                return shard
        path = self.parts[part].path / layout.shard_path(array, plane, None if verifier else slot)
        shard = _Shard(path, self.column(part, layout.CHUNK_CHECKSUMS)[row].copy())
        with self._lock:
            self._shards[key] = shard
            while len(self._shards) > max(1, min(self._max_open, self._max_together // len(_readers))):
                self._shards.popitem(last=False)
        return shard


class _Shard:
    """A mapped shard file. The map lives as long as the last view of it.

    checksums: uint32 [chunks], what the part lists for each chunk of this shard; it binds a chunk to its place, since two
    shards of sign_mantissa are of one size and each chunk's own checksum goes with it wherever it is moved.
    """

    def __init__(self, path: Path, checksums: np.ndarray) -> None:
        self.path, self.checksums = path, checksums
        self.data = map_file(path)
        self.index = read_index(self.data, len(checksums), str(path))
        self.checked = np.zeros(len(checksums), bool)

    def stored(self, number: int, size: int) -> np.ndarray:
        """Chunk `number` as it lies in the map, checked: uint8 [size]."""
        chunk = self._checked(number)
        self._check_size(number, len(chunk), size)
        return np.frombuffer(chunk, np.uint8)

    def decompressed(self, number: int, size: int) -> np.ndarray:
        """Chunk `number`, checked and decompressed: uint8 [size], valid until this thread decompresses the next one."""
        chunk = self._checked(number)
        self._check_size(number, zstd_content_bytes(chunk), size)
        out = _scratch(size)
        try:
            zstd.decompress(chunk, out)
        except (RuntimeError, ValueError) as error:
            raise CacheDamaged(f"the chunk cannot be decompressed: {error}", place=f"{self.path} chunk {number}") from None
        return out

    def _checked(self, number: int) -> memoryview:
        offset, size = (int(value) for value in self.index[number])
        if self.checked[number]:
            return self.data[offset : offset + size - CHECKSUM_BYTES]
        chunk = checked_chunk(self.data, offset, size, int(self.checksums[number]), f"{self.path} chunk {number}")
        self.checked[number] = True
        return chunk

    def _check_size(self, number: int, found: int | None, wanted: int) -> None:
        if found != wanted:
            raise CacheDamaged(
                "the chunk has another size than its array says", place=f"{self.path} chunk {number}", found=found, expected=f"{wanted} bytes"
            )


_readers: weakref.WeakSet[CacheReader] = weakref.WeakSet()
"""Those of this process that somebody still has."""
_of_thread = threading.local()


def _scratch(size: int) -> np.ndarray:
    """A buffer of this thread, used again and again: fresh pages would cost more than the decoding."""
    if len(getattr(_of_thread, "scratch", ())) < size:
        _of_thread.scratch = np.empty(size, np.uint8)
    found: np.ndarray = _of_thread.scratch[:size]
    return found


def _offsets(part: Path, found: PartManifest, cache: CacheSpec) -> np.ndarray:
    offsets = read_small(part, found, cache, "sample_offsets")
    if offsets[0] != 0 or offsets[-1] != found.tokens or (np.diff(offsets) <= 0).any():
        raise CacheDamaged(
            "the samples do not fill the part, each after the other",
            place=str(part / "sample_offsets"),
            expected=f"ascending from 0 to {found.tokens}",
        )
    return offsets
