"""Writer: Samples in, published parts out.

Owns the part under construction: one chunk of rows in memory, one open shard file per layer and plane. Publishes by
rename; what is not published is deleted on the next start. Knows nothing of engines or datasets. FORMAT.md is the law.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zarr
from numcodecs import zstd
from zarr.codecs import Crc32cCodec, ZstdCodec

from ..common import atomic, layout, manifest, planes, spec
from ..common.errors import OUT_OF_SPACE, InputError, disk_full
from ..common.fingerprint import digest_file
from ..common.sample import Sample
from ..common.shard import ShardWriter
from ..common.spec import CacheSpec

ZSTD_LEVEL = 1


def open_cache(cache: Path, wanted: CacheSpec) -> CacheSpec:
    """Create the cache, or continue one that was made with the same settings; returns the spec in force.

    Raises InputError for a folder that holds something else, or a cache of other settings (naming each).
    """
    if (cache / layout.CACHE_JSON).exists():
        existing = spec.load(cache)
        spec.check_same_settings(cache, existing, wanted)
        return existing
    if cache.exists() and any(entry.name != layout.TARGET for entry in cache.iterdir()):
        raise InputError(
            "is not empty and is no feature cache",
            place=f"--cache {cache}",
            expected="an empty or new folder, or a cache to continue",
            fix="choose another folder",
        )
    with guard_space(cache):
        cache.mkdir(parents=True, exist_ok=True)
        spec.save(cache, wanted)
    return wanted


def stored_keys(cache: Path, existing: CacheSpec) -> set[bytes]:
    """The keys of every sample in published parts. Raises CacheDamaged as `manifest.load` does."""
    keys: set[bytes] = set()
    for part in manifest.list_parts(cache):
        found = manifest.load(part, existing)
        raw = np.asarray(zarr.open_group(part, mode="r")["sample_key"][:])
        keys.update(raw.tobytes()[i * 16 : (i + 1) * 16] for i in range(found.samples))
    return keys


@contextmanager
def guard_space(place: Path) -> Iterator[None]:
    """Turn the operating system's "no space", "quota" and "file too large" into DiskFull."""
    try:
        yield
    except OSError as error:
        if error.errno in OUT_OF_SPACE:
            raise disk_full(error, str(place)) from error
        raise


class CacheWriter:
    """Writes samples into one cache. Not thread-safe; several processes may write with different `writer_id`s.

    Raises DiskFull when a write finds no space: the part under construction is dropped, published parts stay.
    """

    def __init__(self, cache: Path, existing: CacheSpec, writer_id: int = 0) -> None:
        self.cache, self.spec, self.writer_id = cache, existing, writer_id
        self.samples = self.tokens = self.stored_bytes = self.parts = 0
        """Published so far by this writer, and their size on disk."""
        self._part: _Part | None = None
        for name in (layout.PARTS, layout.PARTIAL):
            (cache / name).mkdir(exist_ok=True)
        for folder in (cache / layout.PARTIAL).iterdir():
            parsed = layout.parse_part_name(folder.name)
            if parsed is None or parsed[1] == writer_id:
                shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink()
        names = [parsed for path in manifest.list_parts(cache) if (parsed := layout.parse_part_name(path.name))]
        self._next_number = 1 + max((number for number, writer in names if writer == writer_id), default=-1)

    @property
    def pending_tokens(self) -> int:
        """Tokens in the part under construction."""
        return self._part.tokens if self._part else 0

    def add(self, sample: Sample) -> None:
        """Append one sample; publishes the part when it is full or old enough."""
        _check_shapes(sample, self.spec)
        with self._guard():
            if self._part is None:
                name = layout.part_name(self._next_number, self.writer_id)
                self._part = _Part(self.cache / layout.PARTIAL / name, self.spec)
            self._part.add(sample)
        limits = self.spec.limits
        if self._part.tokens >= limits.part_tokens or self._part.age_seconds >= limits.part_seconds:
            self.publish()

    def publish(self) -> None:
        """Publish the part under construction, if it holds anything."""
        part = self._part
        if part is None:
            return
        with self._guard():
            finished = part.finish()
            atomic.publish_folder(part.folder, self.cache / layout.PARTS / part.folder.name)
        self._part = None
        self._next_number += 1
        self.parts += 1
        self.samples += finished.samples
        self.tokens += finished.tokens
        self.stored_bytes += finished.stored_bytes

    def close(self) -> None:
        """Publish what remains."""
        self.publish()

    def abandon(self) -> None:
        """Drop the part under construction."""
        if self._part is not None:
            self._part.abandon()
            self._part = None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            with guard_space(self.cache):
                yield
        except BaseException:
            self.abandon()
            raise


def _check_shapes(sample: Sample, existing: CacheSpec) -> None:
    length, width, layers = len(sample), existing.hidden_size, len(existing.layer_ids)
    assert length > 0
    assert len(sample.key) == 16
    assert sample.loss_mask.shape == (length,)
    for states, shape in ((sample.hidden_states, (length, layers, width)), (sample.verifier_last_hidden_states, (length, width))):
        assert states.shape == shape, (states.shape, shape)
        assert states.dtype == np.uint16


class _Part:
    """One part under construction."""

    def __init__(self, folder: Path, existing: CacheSpec) -> None:
        self.folder, self.spec = folder, existing
        self.tokens = 0
        self._started = time.monotonic()
        self._samples: list[Sample] = []  # without their states
        layers, width, chunk = len(existing.layer_ids), existing.hidden_size, existing.limits.chunk_tokens
        self._rows = np.zeros((layers + 1, chunk, width), np.uint16)
        self._filled = 0
        slots: list[tuple[str, int | None]] = [(layout.HIDDEN_STATES, slot) for slot in range(layers)]
        slots.append((layout.VERIFIER, None))
        folder.mkdir(parents=True)
        self._shards = [{plane: (layout.shard_path(array, plane, slot)) for plane in layout.PLANES} for array, slot in slots]
        self._writers = {name: ShardWriter(folder / name) for shard in self._shards for name in shard.values()}

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self._started

    def add(self, sample: Sample) -> None:
        start, length = 0, len(sample)
        chunk = self.spec.limits.chunk_tokens
        while start < length:
            take = min(length - start, chunk - self._filled)
            rows = slice(self._filled, self._filled + take)
            self._rows[:-1, rows] = sample.hidden_states[start : start + take].transpose(1, 0, 2)
            self._rows[-1, rows] = sample.verifier_last_hidden_states[start : start + take]
            self._filled += take
            start += take
            if self._filled == chunk:
                self._flush_chunk()
        self.tokens += length
        nothing = np.empty((0,), np.uint16)
        self._samples.append(
            Sample(
                key=sample.key,
                source=sample.source,
                source_row=sample.source_row,
                input_ids=sample.input_ids.astype(np.int32),
                loss_mask=sample.loss_mask.astype(np.uint8),
                hidden_states=nothing,
                verifier_last_hidden_states=nothing,
                engine_top1=sample.engine_top1,
                next_token=sample.next_token,
            )
        )

    def _flush_chunk(self) -> None:
        self._rows[:, self._filled :] = 0
        for slot, shard in enumerate(self._shards):
            bits = planes.LOSSLESS_BITS if slot == len(self._shards) - 1 else self.spec.mantissa_bits
            exponent, sign_mantissa = planes.encode(self._rows[slot], bits)
            self._writers[shard[layout.EXPONENT]].append(zstd.compress(exponent, ZSTD_LEVEL))
            self._writers[shard[layout.SIGN_MANTISSA]].append(sign_mantissa)
        self._filled = 0

    def finish(self) -> manifest.PartManifest:
        """Write the last chunk, the indices, the small arrays, the metadata, and last the manifest."""
        if self._filled:
            self._flush_chunk()
        files = {}
        for name, writer in self._writers.items():
            record = writer.close()
            files[name] = manifest.FileEntry(size=record.size, xxh3_128=record.xxh3_128)
        sources = tuple(dict.fromkeys(sample.source for sample in self._samples))
        found = manifest.PartManifest(
            fingerprint=self.spec.fingerprint,
            part=self.folder.name,
            tokens=self.tokens,
            samples=len(self._samples),
            supervised_tokens=int(sum(int(sample.loss_mask.sum()) for sample in self._samples)),
            chunk_tokens=self.spec.limits.chunk_tokens,
            sources=sources,
            files={},
        )
        group = zarr.create_group(self.folder)
        self._create_state_arrays(group, found)
        self._write_small_arrays(group, found, sources)
        (self.folder / layout.ZARR_JSON).unlink()  # written by hand below: canonical bytes, sealed with a digest
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and name not in files:
                size, digest = digest_file(path)
                files[name] = manifest.FileEntry(size=size, xxh3_128=digest)
        found = found.model_copy(update={"files": dict(sorted(files.items()))})
        assert set(files) == manifest.expected_files(self.spec, found)
        atomic.write_bytes(self.folder / layout.ZARR_JSON, manifest.group_document(found))
        return found

    def _create_state_arrays(self, group: zarr.Group, found: manifest.PartManifest) -> None:
        layers, width, chunk = len(self.spec.layer_ids), self.spec.hidden_size, found.chunk_tokens
        padded = found.num_chunks * chunk
        for array, inner, names in (
            (layout.HIDDEN_STATES, (layers,), ("token", "layer", "hidden")),
            (layout.VERIFIER, (), ("token", "hidden")),
        ):
            packed = array == layout.HIDDEN_STATES and self.spec.mantissa_bits == planes.PACKED_BITS
            for plane, last, codecs in (
                (layout.EXPONENT, width, [ZstdCodec(level=ZSTD_LEVEL), Crc32cCodec()]),
                (layout.SIGN_MANTISSA, width // 2 if packed else width, [Crc32cCodec()]),
            ):
                ones = tuple(1 for _ in inner)
                group.create_array(
                    f"{array}/{plane}",
                    shape=(found.tokens, *inner, last),
                    dtype="uint8",
                    chunks=(chunk, *ones, last),
                    shards=(padded, *ones, last),
                    compressors=codecs,
                    filters=None,
                    fill_value=0,
                    dimension_names=names,
                )

    def _write_small_arrays(self, group: zarr.Group, found: manifest.PartManifest, sources: tuple[str, ...]) -> None:
        samples = self._samples
        lengths = [len(sample) for sample in samples]
        values = {
            "input_ids": np.concatenate([sample.input_ids for sample in samples]),
            "loss_mask": np.concatenate([sample.loss_mask for sample in samples]),
            "sample_offsets": np.concatenate([[0], np.cumsum(lengths)]),
            "sample_key": np.frombuffer(b"".join(sample.key for sample in samples), np.uint8).reshape(-1, 16),
            "source_row": np.array([sample.source_row for sample in samples]),
            "source_index": np.array([sources.index(sample.source) for sample in samples]),
            "engine_top1": np.array([sample.engine_top1 for sample in samples]),
            "next_token": np.array([sample.next_token for sample in samples]),
        }
        for name, (shape, dtype) in manifest.small_arrays(found).items():
            array = group.create_array(
                name,
                shape=shape,
                dtype=dtype,
                chunks=shape,
                compressors=[Crc32cCodec()],
                filters=None,
                fill_value=0,
                config={"write_empty_chunks": True},
            )
            array[...] = values[name].astype(dtype)

    def abandon(self) -> None:
        for writer in self._writers.values():
            writer.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)
