"""Who may write into a cache: one extraction or repair at a time, and never beside a writer that outlived its run.

Locks are the kernel's (flock), on folders: they end with the process that holds them, however it dies, and leave no file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import atomic, layout
from .errors import InputError, guard_writing

PATIENCE_SECONDS = 30.0
"""How long a writer may outlive its run: a worker process notices the death of its parent within seconds."""


class Hold:
    """A folder's lock, shared or exclusive; ends with `close` or with the object.

    Raises BlockingIOError when it is taken, InputError where the file system cannot lock.
    """

    def __init__(self, folder: Path, *, shared: bool) -> None:
        self._handle: int | None = None
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(handle)
            if isinstance(error, OSError) and error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise InputError(
                    "the file system cannot lock",
                    place=str(folder),
                    found=error.strerror,
                    expected="flock, so that two extractions do not mix",
                    fix="mount it with locking (Lustre: -o flock), or extract into a folder elsewhere",
                ) from None
            raise
        self._handle = handle

    def close(self) -> None:
        """Let go. Harmless when called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    __del__ = close


@contextmanager
def only_writer(cache: Path) -> Iterator[None]:
    """Hold the cache for writing; makes its folder when it is not there.

    Raises InputError while another extraction or repair holds it, or a writer of an earlier one is still at work.
    """
    with guard_writing(cache):
        atomic.make_folder(cache)
        try:
            held = Hold(cache, shared=False)
        except BlockingIOError:
            raise InputError(
                "another extraction is writing into it", place=f"--cache {cache}", found=_holder(cache), fix="wait for it, or use another folder"
            ) from None
    try:
        _wait_for_writers(cache)
        yield
    finally:
        held.close()


def _wait_for_writers(cache: Path) -> None:
    """Wait until no CacheWriter holds `partial/`: what it may yet publish has to be seen by whoever comes next."""
    folder, until = cache / layout.PARTIAL, time.monotonic() + PATIENCE_SECONDS
    while folder.is_dir():
        try:
            Hold(folder, shared=False).close()
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise InputError(
                    f"a writer of an earlier extraction has been at work for another {PATIENCE_SECONDS:.0f} seconds",
                    place=f"--cache {cache}",
                    found=_holder(folder),
                    fix="end the process that still has its partial/ folder open",
                ) from None
            time.sleep(0.05)


def _holder(folder: Path) -> str | None:
    """Who has the lock of `folder`; None where the kernel does not tell (another machine, another kind of system)."""
    try:
        status = folder.stat()
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return next((f"process {words[4]} of this machine" for words in locks if words[1] == "FLOCK" and words[5] == wanted), None)
    except (OSError, IndexError):
        return None
