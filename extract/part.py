"""PartBuilder: one part under construction, from its first row to its manifest.

Owns one open shard file per layer and plane, and the ChunkEncoder that fills them. Publishes nothing.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

from ..common import atomic, layout, manifest, planes
from ..common.fingerprint import digest_file
from ..common.sample import Sample
from ..common.shard import ShardWriter
from ..common.spec import CacheSpec
from .encoder import ZSTD_LEVEL, ChunkEncoder


class PartBuilder:
    """One part under construction. Not thread-safe. Raises OSError as the file system does; then it is to be abandoned."""

    def __init__(self, folder: Path, existing: CacheSpec, threads: int, ahead: int = 0) -> None:
        """Make `folder` and open its shards. threads, ahead: see ChunkEncoder."""
        self.folder, self.spec = folder, existing
        self.tokens = 0
        self._started = time.monotonic()
        self._samples: list[Sample] = []  # without their states
        self._filled = 0
        folder.mkdir(parents=True)
        self._writers: dict[str, ShardWriter] = {}
        self._encoder: ChunkEncoder | None = None
        try:
            for shard in layout.shards(len(existing.layer_ids)):
                self._writers[layout.shard_path(*shard)] = ShardWriter(folder / layout.shard_path(*shard))
            self._encoder = ChunkEncoder(existing, self._writers, threads, ahead)
        except BaseException:
            self.abandon()
            raise

    @property
    def age_seconds(self) -> float:
        """Since it was begun."""
        return time.monotonic() - self._started

    def add(self, sample: Sample) -> None:
        """Append the rows of one sample."""
        assert self._encoder is not None
        start, length = 0, len(sample)
        chunk = self.spec.limits.chunk_tokens
        while start < length:
            take = min(length - start, chunk - self._filled)
            rows = slice(self._filled, self._filled + take)
            self._encoder.rows[:-1, rows] = sample.hidden_states[start : start + take].transpose(1, 0, 2)
            self._encoder.rows[-1, rows] = sample.verifier_last_hidden_states[start : start + take]
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
        assert self._encoder is not None
        self._encoder.rows[:, self._filled :] = 0
        self._encoder.flush()
        self._filled = 0

    def finish(self) -> manifest.PartManifest:
        """Write the last chunk, the indices, the small arrays, the metadata, and last the manifest."""
        if self._filled:
            self._flush_chunk()
        assert self._encoder is not None
        self._encoder.finish()
        self._encoder = None
        records = {name: writer.close() for name, writer in self._writers.items()}
        files = {name: manifest.FileEntry(size=record.size, xxh3_128=record.xxh3_128) for name, record in records.items()}
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
        self._write_small_arrays(group, found, np.array([record.checksums for record in records.values()], np.uint32))
        (self.folder / layout.ZARR_JSON).unlink()  # written by hand below: canonical bytes, sealed with a digest
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and name not in files:
                size, digest = digest_file(path)
                files[name] = manifest.FileEntry(size=size, xxh3_128=digest)
        found = found.model_copy(update={"files": dict(sorted(files.items()))})
        assert set(files) == set(manifest.expected_files(self.spec, found))
        assert all(files[name].size == size for name, size in manifest.expected_files(self.spec, found).items() if size is not None)
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

    def _write_small_arrays(self, group: zarr.Group, found: manifest.PartManifest, checksums: np.ndarray) -> None:
        samples = self._samples
        lengths = [len(sample) for sample in samples]
        values = {
            "input_ids": np.concatenate([sample.input_ids for sample in samples]),
            "loss_mask": np.concatenate([sample.loss_mask for sample in samples]),
            "sample_offsets": np.concatenate([[0], np.cumsum(lengths)]),
            "sample_key": np.frombuffer(b"".join(sample.key for sample in samples), np.uint8).reshape(-1, 16),
            "source_row": np.array([sample.source_row for sample in samples]),
            "source_index": np.array([found.sources.index(sample.source) for sample in samples]),
            "engine_top1": np.array([sample.engine_top1 for sample in samples]),
            "next_token": np.array([sample.next_token for sample in samples]),
            layout.CHUNK_CHECKSUMS: checksums,
        }
        for name, (shape, dtype) in found.small_arrays(self.spec).items():
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
        """Delete what was written. Harmless in any state."""
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None
        for writer in self._writers.values():
            writer.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)
