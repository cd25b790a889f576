"""Publishing by rename: nothing is ever visible half-written, and what is visible survives a power cut."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


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


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file under a sibling name, fsync it, rename it to `path`, fsync the folder. Replaces an older file."""
    sibling = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
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


def write_json(path: Path, document: Any) -> None:
    """Write `document` as indented JSON with sorted keys, atomically."""
    write_bytes(path, (json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def publish_folder(folder: Path, destination: Path) -> None:
    """fsync everything below `folder`, then rename it to `destination`, which must not exist, and make that durable."""
    fsync_tree(folder)
    os.rename(folder, destination)
    fsync_folder(destination.parent)
    fsync_folder(folder.parent)
