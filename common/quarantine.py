"""`quarantine/`: where what is damaged is moved, whole and for ever. Nothing in it is read, and nothing is deleted."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from . import atomic, layout
from .errors import CacheDamaged


def set_aside(cache: Path, path: Path) -> Path:
    """Move `path`, a file, folder or link inside `cache`, to `quarantine/NAME` in one step, durably; returns its new place.

    A name that is taken there gets a number: NAME.1, NAME.2. For whoever alone may write into the cache. Raises CacheDamaged when
    `quarantine/` is a link: nothing of a cache is moved out of it.
    """
    folder = cache / layout.QUARANTINE
    if folder.is_symlink():
        raise CacheDamaged("is a symbolic link", place=str(folder), expected="a folder; nothing of a cache lies outside of it", fix="remove the link")
    atomic.make_folder(folder)
    names = (path.name if number == 0 else f"{path.name}.{number}" for number in count())
    destination = next(folder / name for name in names if not os.path.lexists(folder / name))
    os.rename(path, destination)  # a link is moved itself, never followed
    atomic.fsync_folder(folder)
    atomic.fsync_folder(path.parent)
    return destination
