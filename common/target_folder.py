"""`target/`: what training needs of the target, sealed with the size and digest of every file.

The folder is written once by stage one and checked by whoever reads a file of it.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from . import atomic, layout
from .errors import CacheDamaged
from .fingerprint import canonical, digest_bytes, digest_file
from .spec import read_json

SEAL = "files.json"


def seal(folder: Path) -> None:
    """Write `files.json` over every file of `folder` (subfolders included)."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != SEAL:
            size, digest = digest_file(path)
            files[name] = {"size": size, "xxh3_128": digest}
    atomic.write_json(folder / SEAL, {"files": files, "digest": digest_bytes(canonical(files))})


def check(cache: Path, *names: str) -> Path:
    """The path of `target/`, after checking `names` (all files when none is given) against the seal.

    Raises CacheDamaged naming the file that is missing, changed, or not inside the folder.
    """
    folder, files = cache / layout.TARGET, read_seal(cache)
    for name in names or files:
        _check_file(folder, name, files)
    return folder


def read_seal(cache: Path) -> dict[str, Any]:
    """What the seal says of each file, by name: `size` and `xxh3_128`. The files themselves are not read.

    Raises CacheDamaged when there is no seal, or it was changed.
    """
    folder = cache / layout.TARGET
    if folder.is_symlink():
        raise CacheDamaged("is a symbolic link", place=str(folder), expected="a folder; nothing of a cache lies outside of it")
    if not (folder / SEAL).is_file():
        raise CacheDamaged(
            "the target's files are missing or were never completed",
            place=str(folder),
            expected=f"a folder with {SEAL}",
        )
    document = read_json(folder / SEAL)
    files = document.get("files")
    if not isinstance(files, dict) or document.get("digest") != digest_bytes(canonical(files)):
        raise CacheDamaged("the seal was changed", place=str(folder / SEAL))
    return files


def _check_file(folder: Path, name: str, files: dict[str, object]) -> None:
    inside = PurePosixPath(name)
    if inside.is_absolute() or ".." in inside.parts:
        raise CacheDamaged("the seal names a file outside of the folder", place=str(folder / SEAL), found=name)
    way = [folder.joinpath(*inside.parts[: depth + 1]) for depth in range(len(inside.parts))]
    try:
        if name not in files or not way or any(path.is_symlink() for path in way) or not way[-1].is_file():
            raise CacheDamaged("the file is missing", place=str(folder / name), expected="a plain file, as the seal lists it")
        size, digest = digest_file(way[-1])
    except OSError as error:
        raise CacheDamaged(f"cannot be read: {error.strerror}", place=str(folder / name)) from None
    if {"size": size, "xxh3_128": digest} != files[name]:
        raise CacheDamaged("the file is not as it was written", place=str(way[-1]), found=f"{size} bytes, {digest}", expected=f"{files[name]}")
