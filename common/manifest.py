"""The manifest of a part: its counts, and every file's size and digest; kept in the attributes of the part's Zarr group.

What stands under `parts/` is complete by definition (published by rename), and the list of parts is the folder listing.
The manifest is what a part is checked against before anything of it is allocated or believed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from . import layout
from .config import Config
from .errors import CacheDamaged
from .fingerprint import canonical, digest_bytes
from .spec import CacheSpec, read_json

ATTRIBUTE = "dflash"


class FileEntry(Config):
    """One file of a part."""

    size: int = Field(ge=0)
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

    def own_digest(self) -> str:
        """What `digest` must be."""
        return digest_bytes(canonical(self.model_dump(mode="json", exclude={"digest"})))


def group_document(manifest: PartManifest) -> bytes:
    """The bytes of the part's `zarr.json`. They are canonical JSON, so that any changed byte shows."""
    sealed = manifest.model_copy(update={"digest": manifest.own_digest()})
    return canonical({"zarr_format": 3, "node_type": "group", "attributes": {ATTRIBUTE: sealed.model_dump(mode="json")}})


def list_parts(cache: Path) -> list[Path]:
    """The published parts in order of their names.

    Raises CacheDamaged for anything else under `parts/`, and for a part that is a symbolic link.
    """
    folder = cache / layout.PARTS
    if not folder.is_dir():
        return []
    parts = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda item: item.name):
            if layout.parse_part_name(entry.name) is None or not entry.is_dir(follow_symlinks=False):
                raise CacheDamaged("is no part", place=entry.path, expected="only folders named NNNNNNNN-WWWW, no links", fix="move it away")
            parts.append(folder / entry.name)
    return parts


def load(part: Path, spec: CacheSpec) -> PartManifest:
    """Read a part's manifest and check it against the cache, itself and the files' sizes. No array is opened.

    Raises CacheDamaged naming the part and what is wrong.
    """
    path = part / layout.ZARR_JSON
    if not path.is_file():
        raise CacheDamaged("the part has no zarr.json", place=str(part))
    document = read_json(path)
    try:
        manifest = PartManifest.model_validate(document["attributes"][ATTRIBUTE])
    except (KeyError, TypeError):
        raise CacheDamaged("has no manifest in its attributes", place=str(path)) from None
    except ValidationError as error:
        raise CacheDamaged(f"has a manifest that cannot be trusted: {error.errors()[0]['msg']}", place=str(path)) from None
    if manifest.digest != manifest.own_digest() or path.read_bytes() != group_document(manifest):
        raise CacheDamaged("the manifest's digest does not match", place=str(path))
    if manifest.fingerprint != spec.fingerprint:
        raise CacheDamaged("the part belongs to another cache", place=str(part), found=manifest.fingerprint, expected=spec.fingerprint)
    if manifest.part != part.name:
        raise CacheDamaged("the part was renamed", place=str(part), found=part.name, expected=manifest.part)
    _check_files(part, manifest, expected_files(spec, manifest))
    return manifest


def expected_files(spec: CacheSpec, manifest: PartManifest) -> set[str]:
    """The path of every file, the group's zarr.json aside, that a part must have."""
    files = set()
    for plane in layout.PLANES:
        files |= {layout.shard_path(layout.HIDDEN_STATES, plane, slot) for slot in range(len(spec.layer_ids))}
        files.add(layout.shard_path(layout.VERIFIER, plane, None))
        files |= {f"{array}/{plane}/{layout.ZARR_JSON}" for array in (layout.HIDDEN_STATES, layout.VERIFIER)}
    files |= {f"{array}/{layout.ZARR_JSON}" for array in (layout.HIDDEN_STATES, layout.VERIFIER)}
    for name, (shape, _) in small_arrays(manifest).items():
        files.add(f"{name}/{layout.ZARR_JSON}")
        files.add(f"{name}/c/" + "/".join("0" for _ in shape))
    return files


def small_arrays(manifest: PartManifest) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array besides the states. Each is one chunk."""
    tokens, samples = manifest.tokens, manifest.samples
    return {
        "input_ids": ((tokens,), "int32"),
        "loss_mask": ((tokens,), "uint8"),
        "sample_offsets": ((samples + 1,), "int64"),
        "sample_key": ((samples, 16), "uint8"),
        "source_row": ((samples,), "int64"),
        "source_index": ((samples,), "int32"),
        "engine_top1": ((samples,), "int32"),
        "next_token": ((samples,), "int32"),
    }


def _check_files(part: Path, manifest: PartManifest, expected: set[str]) -> None:
    if set(manifest.files) != expected:
        odd = sorted(set(manifest.files) ^ expected)
        raise CacheDamaged("the manifest lists other files than a part has", place=str(part), found=odd[:5])
    for name, entry in manifest.files.items():
        path = part / name
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            raise CacheDamaged("the file is missing", place=str(path)) from None
        if not os.path.isfile(path) or os.path.islink(path):
            raise CacheDamaged("is no plain file", place=str(path))
        if status.st_size != entry.size:
            raise CacheDamaged(
                "the file has another size than when it was written", place=str(path), found=f"{status.st_size} bytes", expected=f"{entry.size} bytes"
            )


def dump(manifest: PartManifest) -> dict[str, Any]:
    """The manifest as a JSON document."""
    return dict(json.loads(group_document(manifest))["attributes"][ATTRIBUTE])
