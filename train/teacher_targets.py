"""TeacherTargets: the targets of one cache by one head, part by part, some of which may not be there.

In: a cache's reader and what computes the teacher. Out: the teacher's tokens of samples; and parts, published in one step. Several
processes may publish the same part: what each writes is the same. Computes no token; no torch.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..common import atomic, layout
from ..common.errors import CacheDamaged, RunFailed
from .reader import CacheReader
from .targets import AGAIN, UNKNOWN, HeadIdentity, Targets, find, write

MAX_KEPT_BYTES = 256 << 20
"""Tokens of parts kept in memory, bytes."""
LEFT_OVER_SECONDS = 3600.0
"""What was half written longer ago has no writer any more: writing a part takes milliseconds."""
ATTEMPTS = 16


class TeacherTargets:
    """Threads may share it."""

    def __init__(self, reader: CacheReader, head: HeadIdentity) -> None:
        self.reader, self.head = reader, head
        self.folder = reader.path / layout.TARGETS / head.fingerprint
        self._vocab = reader.spec.settings.target.vocab_size
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def path(self, part: int) -> Path:
        """Where those of a part lie, or would."""
        return self.folder / self.reader.parts[part].path.name

    def find(self, part: int) -> Targets | None:
        """Those of a part as the part is now; None when there are none. Only the manifest is looked at. Raises CacheDamaged."""
        if not os.path.lexists(self.path(part)):
            return None
        found, now = find(self.path(part)), self.reader.parts[part].manifest
        if found.manifest.part_digest != now.digest:
            return None  # of an earlier part of that name
        if found.manifest.tokens != now.tokens:
            raise CacheDamaged("has another number of rows than its part", place=str(found.path), fix=AGAIN)
        return found

    def is_whole(self, part: int) -> bool:
        """They are there, every byte is as it was written, and just the rows that need a token have one. Raises CacheDamaged."""
        if (found := self.find(part)) is None:
            return False
        if not np.array_equal(np.flatnonzero(found.read(self._vocab) != UNKNOWN), asked_rows(self.reader, part)):
            raise CacheDamaged("lacks tokens, or has some that nobody asks for", place=str(found.path), fix=AGAIN)
        return True

    def sample(self, sample: int) -> np.ndarray:
        """int32 [T], read-only: the teacher's token after each row of a sample, UNKNOWN where nobody asks. Raises CacheDamaged."""
        start = int(self.reader.starts[sample])
        return self._of_part(int(self.reader.part_of[sample]))[start : start + int(self.reader.lengths[sample])]

    def probe(self) -> None:
        """Raise OSError now when nothing could be published."""
        if self.folder.parent.is_symlink() or self.folder.is_symlink():
            raise OSError(errno.ELOOP, "is a symbolic link; nothing of a cache lies outside of it", str(self.folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic.probe(self.folder / layout.ZARR_JSON)

    def publish(self, part: int, tokens: np.ndarray) -> int:
        """Keep int32 [T] of a part; returns the bytes. What is there already is left when it is whole, and else replaced.

        Nothing is made durable: what a power cut spoils is found by its digest and computed again. Raises OSError.
        """
        destination, now = self.path(part), self.reader.parts[part].manifest
        assert tokens.shape == (now.tokens,)
        assert tokens.dtype == np.int32
        self.folder.mkdir(parents=True, exist_ok=True)
        sibling = atomic.sibling_of(destination)
        try:
            written = write(sibling, tokens, self.head, now.part, now.digest)
            self._put(sibling, destination, part)
        finally:
            shutil.rmtree(sibling, ignore_errors=True)
        for path in self.folder.iterdir():
            with suppress(OSError):
                if atomic.is_sibling(path.name, [destination.name]) and time.time() - path.lstat().st_mtime > LEFT_OVER_SECONDS:
                    _remove(path)
        return written.stored_bytes

    def _put(self, sibling: Path, destination: Path, part: int) -> None:
        for _ in range(ATTEMPTS):
            try:
                os.rename(sibling, destination)  # onto nothing: the kernel refuses a folder that holds something
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            with suppress(CacheDamaged):
                if self.is_whole(part):
                    return  # another process was faster
            aside = atomic.sibling_of(destination)
            with suppress(FileNotFoundError):
                os.rename(destination, aside)
                _remove(aside)
        raise RunFailed("cannot be replaced: other processes keep writing it", place=str(destination))

    def _of_part(self, part: int) -> np.ndarray:
        with self._lock:
            if (kept := self._kept.get(part)) is not None:
                self._kept.move_to_end(part)
                return kept
        if (found := self.find(part)) is None:
            raise CacheDamaged("the teacher's tokens of this part are gone", place=str(self.path(part)), fix=AGAIN)
        tokens = found.read(self._vocab)
        with self._lock:
            if part not in self._kept:
                self._kept[part] = tokens
                self._kept_bytes += tokens.nbytes
            while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return tokens


def asked_rows(reader: CacheReader, part: int) -> np.ndarray:
    """int64, ascending: the rows of a part whose following token is supervised. A drafter is asked for these and for no other."""
    following = np.append(reader.column(part, "loss_mask")[1:] != 0, False)
    following[reader.parts[part].offsets[1:] - 1] = reader.column(part, "next_token") >= 0
    return np.flatnonzero(following)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
