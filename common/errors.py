"""The errors that a user may see, and the exit code of each.

DflashError            something went wrong; exit code 1
├── InputError         what the user gave is wrong; exit code 2
├── CacheDamaged       bytes on disk are not what was written; exit code 1
└── RunFailed          the work could not be finished: engine died, fidelity failed; exit code 1
    └── DiskFull       no space or quota left; what was committed stays valid

Each says the place, the value found, what was expected and the fix. `assert` is for our own invariants only.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPAIR = "`dflash verify --repair CACHE` sets what is damaged aside; the same `dflash extract` command then writes it anew"
"""The way out of damage in a cache."""


class DflashError(Exception):
    """An error with a place, a value, an expectation and a fix.

    problem: one sentence. place: file, flag or field. found, expected, fix: shown on lines of their own when given.
    """

    exit_code = 1

    def __init__(self, problem: str, *, place: str = "", found: object = None, expected: str = "", fix: str = "") -> None:
        self.problem, self.place, self.found, self.expected, self.fix = problem, place, found, expected, fix
        lines = [f"{place}: {problem}" if place else problem]
        if found is not None:
            lines.append(f"  found:    {found}")
        if expected:
            lines.append(f"  expected: {expected}")
        if fix:
            lines.append(f"  fix:      {fix}")
        super().__init__("\n".join(lines))


class InputError(DflashError):
    """A flag, file, field or dataset that the user gave cannot be used. Exit code 2; nothing was lost."""

    exit_code = 2


class CacheDamaged(DflashError):
    """Bytes in a cache differ from what was written, or a file is missing. Never read on past this."""

    def __init__(self, problem: str, *, place: str = "", found: object = None, expected: str = "", fix: str = "") -> None:
        super().__init__(problem, place=place, found=found, expected=expected, fix=fix or REPAIR)


class RunFailed(DflashError):
    """The work could not be finished: the engine died, fidelity failed, a limit was reached."""


class DiskFull(RunFailed):
    """No space, no quota, or the file-size limit was reached. Committed parts stay valid; the same command continues."""


OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})


def disk_full(error: OSError, place: str) -> DiskFull:
    """The DiskFull that stands for `error`, raised by a write at `place`. Its errno is one of OUT_OF_SPACE."""
    return DiskFull(
        f"could not write: {error.strerror}",
        place=place,
        expected="enough free space and quota for the next part",
        fix="free some space and run the same command again; everything committed is kept",
    )


def not_allowed(error: OSError, place: str) -> InputError:
    """The InputError that stands for `error`, raised by a write at `place`. Its errno is one of NOT_ALLOWED."""
    return InputError(
        f"cannot be written: {error.strerror}",
        place=place,
        found=error.filename,
        expected="a folder that this user may write to, on a file system that is not read-only",
        fix="change its permissions or its mount and run the same command again (everything committed is kept), or choose another folder",
    )


@contextmanager
def guard_writing(place: Path) -> Iterator[None]:
    """Turn what the operating system says of a write below `place` into DiskFull or InputError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in OUT_OF_SPACE:
            raise disk_full(error, str(place)) from error
        if error.errno in NOT_ALLOWED:
            raise not_allowed(error, str(place)) from error
        raise
