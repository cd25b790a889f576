"""Publishing by rename: nothing is ever visible half-written, and what is visible survives a power cut."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

_SIBLING = re.compile(r"\.(.+)\.\d+\.[0-9a-f]{8}")


def fsync_folder(folder: Path) -> None:
    """Make the entries of `folder` durable (renames and new files in it)."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(root: Path) -> None:
    """fsync every file and folder below `root`, leaves first."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            handle = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        fsync_folder(Path(folder))


def make_folder(folder: Path) -> None:
    """Make `folder` and its parents where they are not there, and make each new one durable."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_folder(path.parent)


def sibling_of(path: Path) -> Path:
    """A name beside `path`, nobody else's, under which it can be prepared: `.NAME.PID.RANDOM`."""
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")


def is_sibling(name: str, of: Collection[str]) -> bool:
    """Is `name` one that `sibling_of` gave for one of the names `of`?"""
    match = _SIBLING.fullmatch(name)
    return match is not None and match[1] in of


def clear_siblings(folder: Path, of: Collection[str]) -> None:
    """Delete what a killed process left half-prepared in `folder`. Only for whoever alone may write there."""
    for path in folder.iterdir():
        if is_sibling(path.name, of):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file under a sibling name, fsync it, rename it to `path`, fsync the folder. Replaces an older file."""
    sibling = sibling_of(path)
    try:
        with open(sibling, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(sibling, path)
    except BaseException:
        sibling.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def probe(path: Path) -> None:
    """Raise OSError now when `path` could not be replaced: where its folder is read-only, full or not ours."""
    sibling = sibling_of(path)
    try:
        sibling.write_bytes(b"\0" * 4096)
    finally:
        sibling.unlink(missing_ok=True)


def write_json(path: Path, document: Any) -> None:
    """Write `document` as indented JSON with sorted keys, atomically."""
    write_bytes(path, (json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def publish_folder(folder: Path, destination: Path) -> None:
    """fsync everything below `folder`, then rename it to `destination`, which must not exist, and make that durable."""
    fsync_tree(folder)
    os.rename(folder, destination)
    fsync_folder(destination.parent)
    fsync_folder(folder.parent)
