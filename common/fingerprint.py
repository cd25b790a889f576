"""Fingerprints that speak: a stable hash of a document, and the list of settings in which two documents differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash


def canonical(document: Any) -> bytes:
    """The one JSON text of a document: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def fingerprint(document: Any) -> str:
    """sha256, hex, of the canonical text."""
    return hashlib.sha256(canonical(document)).hexdigest()


def digest_bytes(data: bytes) -> str:
    """xxh3-128, hex: finds any accidental change. Not a defence against an attacker."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_file(path: Path) -> tuple[int, str]:
    """(size in bytes, xxh3-128 hex) of a file."""
    state, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
            size += len(block)
    return size, state.hexdigest()


def sha256_files(paths: list[Path]) -> str:
    """sha256, hex, over names and contents of `paths` in the given order; a missing file counts as absent."""
    state = hashlib.sha256()
    for path in paths:
        if path.is_file():
            data = path.read_bytes()
            state.update(f"{path.name}\0{len(data)}\0".encode())
            state.update(data)
    return state.hexdigest()


def differences(ours: Any, theirs: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, ours, theirs) for each leaf in which two JSON documents differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            yield from differences(ours.get(key), theirs.get(key), f"{name}.{key}" if name else key)
    elif ours != theirs:
        yield name, ours, theirs
