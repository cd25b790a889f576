"""The manifest of a part: its counts, and every file's size and digest; kept in the attributes of the part's Zarr group.

What stands under `parts/` is complete by definition (published by rename), and the list of parts is the folder listing.
The manifest is what a part is checked against before anything of it is allocated or believed.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, ValidationError

from . import layout
from .config import Config
from .errors import REPAIR, CacheDamaged
from .fingerprint import canonical, digest_bytes
from .planes import PACKED_BITS
from .shard import CHECKSUM_BYTES, INDEX_ENTRY_BYTES
from .spec import MAX_CHUNK_BYTES, CacheSpec, read_bounded

ATTRIBUTE = "dflash"
SMALL_ARRAYS: dict[str, tuple[tuple[str | int, ...], str]] = {
    "input_ids": (("T",), "int32"),
    "loss_mask": (("T",), "uint8"),
    "sample_offsets": (("S + 1",), "int64"),
    "sample_key": (("S", 16), "uint8"),
    "source_row": (("S",), "int64"),
    "source_index": (("S",), "int32"),
    "engine_top1": (("S",), "int32"),
    "next_token": (("S",), "int32"),
    layout.CHUNK_CHECKSUMS: (("shards", "chunks"), "uint32"),
}
"""Every array besides the states: its shape in the letters of FORMAT.md, and its type. Each is one chunk."""
MAX_FILES = 4096
"""More than a part of 1,024 layers, the most that a cache may store, has."""
_ITEM_BYTES = {"uint8": 1, "int32": 4, "uint32": 4, "int64": 8}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a part. Not a model: a large cache has half a million of them in memory."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    size: Annotated[int, Field(ge=0)]
    """Bytes."""
    xxh3_128: str
    """Hex digest of the content."""


class PartManifest(Config):
    """The `dflash` attribute of a part's group."""

    fingerprint: str
    """Of the cache that the part belongs to."""
    part: str
    """The part's own folder name."""
    tokens: int = Field(gt=0)
    """Rows of every per-token array (T)."""
    samples: int = Field(gt=0)
    """Rows of every per-sample array (S)."""
    supervised_tokens: int = Field(ge=0)
    """Sum of loss_mask."""
    chunk_tokens: int = Field(gt=0, le=1 << 20)
    """Tokens in a chunk."""
    sources: tuple[str, ...]
    """What `source_index` counts."""
    files: dict[str, FileEntry]
    """Every other file of the part by its path inside it."""
    digest: str = ""
    """xxh3-128 of the canonical JSON of this document without this field."""

    @property
    def num_chunks(self) -> int:
        """Chunks in each shard."""
        return -(-self.tokens // self.chunk_tokens)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its files, the manifest's own aside."""
        return sum(entry.size for entry in self.files.values())

    def small_arrays(self, cache: CacheSpec) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array besides the states."""
        sizes = {"T": self.tokens, "S": self.samples, "S + 1": self.samples + 1, "chunks": self.num_chunks}
        sizes["shards"] = (len(cache.layer_ids) + 1) * len(layout.PLANES)
        return {
            name: (tuple(size if isinstance(size, int) else sizes[size] for size in shape), dtype) for name, (shape, dtype) in SMALL_ARRAYS.items()
        }


def group_document(manifest: PartManifest) -> bytes:
    """The bytes of the part's `zarr.json`, its digest filled in. They are canonical JSON, so that any changed byte shows."""
    body = manifest.model_dump(mode="json", exclude={"digest"})
    body["digest"] = digest_bytes(canonical(body))
    return canonical({"zarr_format": 3, "node_type": "group", "attributes": {ATTRIBUTE: body}})


def list_parts(cache: Path) -> list[Path]:
    """The published parts in order of their names.

    Raises CacheDamaged for anything else under `parts/`, and for a part that is a symbolic link.
    """
    parts, odd = scan_parts(cache)
    if odd:
        raise CacheDamaged("is no part", place=str(odd[0]), expected="only folders named NNNNNNNN-WWWW, no links", fix=REPAIR)
    return parts


def scan_parts(cache: Path) -> tuple[list[Path], list[Path]]:
    """(published parts, whatever else stands under `parts/`), each in order of names. Raises CacheDamaged when `parts/` is a link."""
    folder = cache / layout.PARTS
    if folder.is_symlink():
        raise CacheDamaged("is a symbolic link", place=str(folder), expected="a folder; nothing of a cache lies outside of it")
    if not folder.is_dir():
        return [], []
    parts: list[Path] = []
    odd: list[Path] = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda item: item.name):
            is_part = layout.parse_part_name(entry.name) is not None and entry.is_dir(follow_symlinks=False)
            (parts if is_part else odd).append(folder / entry.name)
    return parts, odd


def load(part: Path, spec: CacheSpec) -> PartManifest:
    """Read a part's manifest and check it against the cache, itself and the files' sizes. No array is opened.

    Raises CacheDamaged naming the part and what is wrong.
    """
    manifest = read(part, spec)
    _check_files(part, manifest, spec)
    return manifest


def read(part: Path, spec: CacheSpec) -> PartManifest:
    """The manifest alone, checked against itself, the cache and the folder's name; the part's files may be damaged.

    Raises CacheDamaged as `load` does.
    """
    path = part / layout.ZARR_JSON
    data, document = read_bounded(path)
    try:
        body = document["attributes"][ATTRIBUTE]
        if len(body["files"]) > MAX_FILES:
            raise CacheDamaged("has a manifest that lists too many files", place=str(path), found=len(body["files"]), expected=f"at most {MAX_FILES}")
        manifest = PartManifest.model_validate(body)
    except (KeyError, TypeError):
        raise CacheDamaged("has no manifest in its attributes", place=str(path)) from None
    except ValidationError as error:
        raise CacheDamaged(f"has a manifest that cannot be trusted: {error.errors()[0]['msg']}", place=str(path)) from None
    if data != group_document(manifest):
        raise CacheDamaged("the manifest's digest does not match", place=str(path))
    if manifest.fingerprint != spec.fingerprint:
        raise CacheDamaged("the part belongs to another cache", place=str(part), found=manifest.fingerprint, expected=spec.fingerprint)
    if manifest.part != part.name:
        raise CacheDamaged("the part was renamed", place=str(part), found=part.name, expected=manifest.part)
    return manifest


def expected_files(spec: CacheSpec, manifest: PartManifest) -> dict[str, int | None]:
    """Every file, the group's zarr.json aside, that a part must have, and its size in bytes where the counts settle it."""
    width, chunks = spec.hidden_size, manifest.num_chunks
    sizes: dict[str, int | None] = dict.fromkeys(_metadata_files())
    for array, plane, slot in layout.shards(len(spec.layer_ids)):
        last = width // 2 if array == layout.HIDDEN_STATES and spec.mantissa_bits == PACKED_BITS else width
        whole = chunks * (manifest.chunk_tokens * last + CHECKSUM_BYTES + INDEX_ENTRY_BYTES) + CHECKSUM_BYTES
        sizes[layout.shard_path(array, plane, slot)] = whole if plane == layout.SIGN_MANTISSA else None
    for name, (shape, dtype) in manifest.small_arrays(spec).items():
        sizes[layout.only_chunk(name, len(shape))] = math.prod(shape) * _ITEM_BYTES[dtype] + CHECKSUM_BYTES
    return sizes


@lru_cache
def _metadata_files() -> tuple[str, ...]:
    groups = (layout.HIDDEN_STATES, layout.VERIFIER)
    arrays = [f"{group}/{plane}" for group in groups for plane in layout.PLANES]
    return tuple(f"{name}/{layout.ZARR_JSON}" for name in (*groups, *arrays, *SMALL_ARRAYS))


@lru_cache
def _folders(layers: int) -> tuple[str, ...]:
    """Every folder inside a part with so many stored layers."""
    files = [*_metadata_files(), *(layout.shard_path(*shard) for shard in layout.shards(layers))]
    files += [layout.only_chunk(name, len(shape)) for name, (shape, _) in SMALL_ARRAYS.items()]
    return tuple(sorted({str(parent) for name in files for parent in PurePosixPath(name).parents} - {"."}))


def _check_files(part: Path, manifest: PartManifest, spec: CacheSpec) -> None:
    """The manifest lists the right files, and each is there: plain, of its size, and not behind a link."""
    chunk_bytes = manifest.chunk_tokens * spec.hidden_size
    if chunk_bytes > MAX_CHUNK_BYTES:
        raise CacheDamaged("the manifest asks for chunks that are too large", place=str(part), found=chunk_bytes, expected=f"{MAX_CHUNK_BYTES} bytes")
    expected = expected_files(spec, manifest)
    if manifest.files.keys() != expected.keys():
        odd = sorted(manifest.files.keys() ^ expected.keys())
        raise CacheDamaged("the manifest lists other files than a part has", place=str(part), found=odd[:5])
    for name in _folders(len(spec.layer_ids)):
        _check_kind(f"{part}/{name}", stat.S_ISDIR, "folder")
    for name, size in expected.items():
        entry = manifest.files[name]
        if size is not None and entry.size != size:
            raise CacheDamaged(
                "the manifest's counts do not give the size of this file",
                place=f"{part}/{name}",
                found=f"{entry.size} bytes",
                expected=f"{size} bytes",
            )
        found = _check_kind(f"{part}/{name}", stat.S_ISREG, "file")
        if found != entry.size:
            raise CacheDamaged(
                "the file has another size than when it was written", place=f"{part}/{name}", found=f"{found} bytes", expected=f"{entry.size} bytes"
            )


def _check_kind(path: str, is_right: Callable[[int], bool], kind: str) -> int:
    """The size of the file or folder at `path`, which must be a plain one."""
    try:
        status = os.lstat(path)
    except OSError as error:
        raise CacheDamaged(
            f"the {kind} is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}", place=path
        ) from None
    if not is_right(status.st_mode):
        raise CacheDamaged(f"is no plain {kind}", place=path)
    return status.st_size
