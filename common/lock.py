"""Who may write into a cache: one extraction or repair at a time, or several that share the work, each writer under an id
of its own; and never beside a writer that outlived its run.

Locks are the kernel's (flock), on folders: they end with the process that holds them, however it dies, and leave no file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import atomic, layout
from .errors import InputError, guard_writing

PATIENCE_SECONDS = 30.0
"""How long a writer may outlive its run: a worker process notices the death of its parent within seconds."""
SHARING_SECONDS = 900.0
"""How long one of several extractions waits for another to make the cache ready: it may have to copy gigabytes of the target."""
POLL_SECONDS = 0.05


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

    def share(self) -> None:
        """Let others share an exclusive lock."""
        assert self._handle is not None
        fcntl.flock(self._handle, fcntl.LOCK_SH)

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


@contextmanager
def one_of_several_writers(cache: Path, make_ready: Callable[[], None]) -> Iterator[None]:
    """Hold the cache together with others that do the same; whoever finds it free calls `make_ready`, alone, before it shares.

    So whoever is inside finds the cache ready. Raises InputError while an extraction that does not share, or a repair, holds it.
    """
    with guard_writing(cache):
        atomic.make_folder(cache)
    held, until = None, time.monotonic() + SHARING_SECONDS
    try:
        while held is None:
            held = _try(cache, shared=False)
            if held is not None:
                _wait_for_writers(cache)
                make_ready()
                held.share()
            else:
                held = _try(cache, shared=True)
            if held is None:
                if time.monotonic() > until:
                    raise InputError(
                        "an extraction that does not share is writing into it", place=f"--cache {cache}", found=_holder(cache), fix="wait for it"
                    )
                time.sleep(POLL_SECONDS)
        yield
    finally:
        if held is not None:
            held.close()


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Alone among those that call this for `folder`, waiting for them."""
    until = time.monotonic() + SHARING_SECONDS
    while (held := _try(folder, shared=False)) is None:
        if time.monotonic() > until:
            raise InputError("another process has locked it for too long", place=str(folder), found=_holder(folder), fix="end that process")
        time.sleep(POLL_SECONDS / 10)
    try:
        yield
    finally:
        held.close()


class WriterSeat:
    """The right to write as `writer_id`: the lock of `partial/writer-WWWW`, which goes with it. `partial/` is there.

    Waits for a writer of that id that is about to end. Raises InputError when it does not.
    """

    def __init__(self, partial: Path, writer_id: int) -> None:
        self._folder = partial / layout.seat_name(writer_id)
        until = time.monotonic() + PATIENCE_SECONDS
        while (held := self._sit()) is None:
            if time.monotonic() > until:
                raise InputError(
                    f"another process writes into this cache as writer {writer_id}",
                    place=str(self._folder),
                    found=_holder(self._folder),
                    fix="give each of several extractions a --rank of its own, or end that process",
                )
            time.sleep(POLL_SECONDS)
        self._held: Hold | None = held

    def _sit(self) -> Hold | None:
        self._folder.mkdir(exist_ok=True)
        try:
            held = Hold(self._folder, shared=False)
        except (BlockingIOError, FileNotFoundError):
            return None
        if not self._folder.is_dir():  # the former holder took it away between the two steps
            held.close()
            return None
        return held

    def close(self) -> None:
        """Let go, and take the folder away. Harmless when called twice."""
        held, self._held = self._held, None
        if held is not None:
            try:
                self._folder.rmdir()
            finally:
                held.close()


def _try(folder: Path, *, shared: bool) -> Hold | None:
    try:
        return Hold(folder, shared=shared)
    except BlockingIOError:
        return None


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
            time.sleep(POLL_SECONDS)


def _holder(folder: Path) -> str | None:
    """Who has the lock of `folder`; None where the kernel does not tell (another machine, another kind of system)."""
    try:
        status = folder.stat()
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return next((f"process {words[4]} of this machine" for words in locks if words[1] == "FLOCK" and words[5] == wanted), None)
    except (OSError, IndexError):
        return None
