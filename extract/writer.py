"""Writer: Samples in, published parts out.

Owns the cache's folder: who may begin it, which parts there are, what is published and what is dropped. Publishes by
rename; what is not published is deleted on the next start. Knows nothing of engines or datasets. FORMAT.md is the law.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..common import atomic, layout, manifest, spec
from ..common.errors import CacheDamaged, InputError, guard_writing
from ..common.lock import Hold, WriterSeat
from ..common.sample import Sample
from ..common.small_arrays import read_small
from ..common.spec import CacheSpec
from .encoder import default_threads
from .part import PartBuilder

PREPARED = (layout.CACHE_JSON, layout.REJECTS, layout.TARGET)
"""What is prepared beside its place in the cache's own folder; a kill may leave the sibling behind."""


def open_cache(cache: Path, wanted: CacheSpec) -> CacheSpec:
    """Create the cache, or continue one that was made with the same settings; returns the spec in force.

    Raises InputError for a folder that holds something else or that cannot be written, a cache of other settings (naming
    each); DiskFull.
    """
    with guard_writing(cache):
        if os.path.lexists(cache / layout.CACHE_JSON) or spec.has_parts(cache):
            existing = spec.load(cache)
            spec.check_same_settings(cache, existing, wanted)
            atomic.probe(cache / layout.CACHE_JSON)
            return existing
        if cache.exists() and any(not atomic.is_sibling(entry.name, PREPARED) for entry in cache.iterdir()):
            raise InputError(
                "is not empty and is no feature cache",
                place=f"--cache {cache}",
                expected="an empty or new folder, or a cache to continue",
                fix="choose another folder",
            )
        atomic.make_folder(cache)
        spec.save(cache, wanted)
    return wanted


def clear_leftovers(cache: Path) -> None:
    """Delete what killed runs left half-written, whoever wrote it. Only under `lock.only_writer`."""
    with guard_writing(cache):
        atomic.clear_siblings(cache, PREPARED)
        for folder in _partial(cache).iterdir():
            _delete(folder)


def stored_keys(cache: Path, existing: CacheSpec) -> set[bytes]:
    """The keys of every sample in published parts. Raises CacheDamaged as `manifest.load` does."""
    keys: set[bytes] = set()
    for part in manifest.list_parts(cache):
        found = manifest.load(part, existing)
        raw = read_small(part, found, existing, "sample_key").tobytes()
        keys.update(raw[i * 16 : (i + 1) * 16] for i in range(found.samples))
    return keys


def take_seat(cache: Path, writer_id: int) -> WriterSeat:
    """The right to write as `writer_id`; whoever held it has ended. Raises as `lock.WriterSeat` does."""
    with guard_writing(cache):
        return WriterSeat(_partial(cache), writer_id)


def clear_writer(cache: Path, writer_id: int) -> None:
    """Delete what a writer left half-written, once it has ended. Raises as `take_seat` does."""
    seat = take_seat(cache, writer_id)
    with guard_writing(cache):
        _clear(_partial(cache), writer_id)
    seat.close()


def _clear(partial: Path, writer_id: int) -> None:
    for folder in partial.iterdir():
        if (parsed := layout.parse_part_name(folder.name)) and parsed[1] == writer_id:
            _delete(folder)


def _partial(cache: Path) -> Path:
    """`partial/`, made when it is not there. Raises CacheDamaged for a link: what is deleted in it must be ours."""
    folder = cache / layout.PARTIAL
    if folder.is_symlink():
        raise CacheDamaged("is a symbolic link", place=str(folder), expected="a folder; nothing of a cache lies outside of it", fix="remove the link")
    atomic.make_folder(folder)
    return folder


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


class CacheWriter:
    """Writes samples into one cache. Not thread-safe; several processes may write with different `writer_id`s.

    Raises DiskFull when a write finds no space, InputError when one is not allowed: the part under construction is dropped,
    published parts stay. While it is open, it holds `partial/` (see `lock.only_writer`).
    """

    def __init__(self, cache: Path, existing: CacheSpec, writer_id: int = 0, threads: int | None = None, *, overlapped: bool = False) -> None:
        """threads: that encode; None is `default_threads()`. The bytes written do not depend on either.

        overlapped: `add` returns while chunks are still encoded, and a full part is made durable and published behind the next one.
        An error may then be raised by a later call than the one that caused it.
        """
        self.cache, self.spec, self.writer_id = cache, existing, writer_id
        self._threads = default_threads() if threads is None else threads
        self._ahead = -(-self._threads // (len(existing.layer_ids) + 1)) if overlapped else 0
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="cache-publish") if overlapped else None
        self._publishing: Future[None] | None = None
        self._publishing_tokens = 0
        self.samples = self.tokens = self.stored_bytes = self.parts = 0
        """Published so far by this writer, and their size on disk."""
        self._part: PartBuilder | None = None
        with guard_writing(cache):
            partial = _partial(cache)
            self._hold = Hold(partial, shared=True)
            atomic.make_folder(cache / layout.PARTS)
            _clear(partial, writer_id)
            parts = manifest.list_parts(cache)
        names = [parsed for path in parts if (parsed := layout.parse_part_name(path.name))]
        self._next_number = 1 + max((number for number, writer in names if writer == writer_id), default=-1)

    @property
    def pending_tokens(self) -> int:
        """Tokens that were added and are not published yet."""
        part = self._part
        return self._publishing_tokens + (part.tokens if part else 0)

    def add(self, sample: Sample) -> None:
        """Append one sample, whose arrays may be used again afterwards; publishes the part when it is full or old enough."""
        _check_shapes(sample, self.spec)
        with self._guard():
            if self._publishing is not None and self._publishing.done():
                self._settle()
            if self._part is None:
                name = layout.part_name(self._next_number, self.writer_id)
                self._part = PartBuilder(self.cache / layout.PARTIAL / name, self.spec, self._threads, self._ahead)
            self._part.add(sample)
        limits = self.spec.limits
        if self._part.tokens >= limits.part_tokens or self._part.age_seconds >= limits.part_seconds:
            self.publish()

    def publish(self) -> None:
        """Publish the part under construction, if it holds anything. Overlapped: begin to, once the part before it is published."""
        if self._part is None:
            return
        with self._guard():
            self._settle()
            part, self._part = self._part, None
            self._next_number += 1
            if self._publisher is None:
                self._publish(part)
            else:
                self._publishing_tokens = part.tokens
                self._publishing = self._publisher.submit(self._publish, part)

    def close(self) -> None:
        """Publish what remains and let go of the cache."""
        self.publish()
        with self._guard():
            self._settle()
        self._let_go()

    def abandon(self) -> None:
        """Drop the part under construction and let go of the cache. A part that is being published is complete, and is waited for."""
        self._drop()
        if self._publishing is not None:
            wait([self._publishing])
        self._let_go()

    def _publish(self, part: PartBuilder) -> None:
        try:
            with guard_writing(self.cache):
                finished = part.finish()
                atomic.publish_folder(part.folder, self.cache / layout.PARTS / part.folder.name)
        except BaseException:
            part.abandon()
            raise
        self._publishing_tokens = 0
        self.parts += 1
        self.samples += finished.samples
        self.tokens += finished.tokens
        self.stored_bytes += finished.stored_bytes

    def _settle(self) -> None:
        """Wait for the part that is being published. Raises what that met."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.result()

    def _let_go(self) -> None:
        if self._publisher is not None:
            self._publisher.shutdown(wait=True)
        self._hold.close()

    def _drop(self) -> None:
        if self._part is not None:
            self._part.abandon()
            self._part = None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            with guard_writing(self.cache):
                yield
        except BaseException:
            self._drop()
            raise


def _check_shapes(sample: Sample, existing: CacheSpec) -> None:
    length, width, layers = len(sample), existing.hidden_size, len(existing.layer_ids)
    assert length > 0
    assert len(sample.key) == 16
    assert sample.loss_mask.shape == (length,)
    for states, shape in ((sample.hidden_states, (length, layers, width)), (sample.verifier_last_hidden_states, (length, width))):
        assert states.shape == shape, (states.shape, shape)
        assert states.dtype == np.uint16
