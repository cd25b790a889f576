"""Targets: the teacher's most likely token after each row of one part, as one small Zarr group beside the parts.

Owns how a group lies under `targets/`, its manifest, and what must hold before its tokens are believed. Each names the head and the
part that it was made of. Computes no token; no torch.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import crc32c
import numpy as np
from pydantic import Field, ValidationError

from ..common import layout, target_folder
from ..common.config import Config
from ..common.errors import CacheDamaged
from ..common.fingerprint import canonical, digest_bytes, digest_file, fingerprint
from ..common.manifest import FileEntry
from ..common.shard import CHECKSUM_BYTES
from ..common.spec import CacheSpec, read_bounded

ATTRIBUTE = "dflash_targets"
UNKNOWN = -1
"""Where no token is kept: what follows the row is not supervised, so that no drafter is ever asked for it."""
DEFINITION = 1
"""To be raised when `target_head` computes a teacher token otherwise."""
AGAIN = "`dflash targets CACHE` computes what is damaged or missing; `targets/` may also be deleted"
"""The way out of damage in targets."""
ARRAY_FILE = layout.only_chunk(layout.TEACHER_TOKENS, 1)
FILES = (f"{layout.TEACHER_TOKENS}/{layout.ZARR_JSON}", ARRAY_FILE)
"""Every file of a group, its own zarr.json aside."""


class HeadIdentity(Config):
    """Everything that a teacher token depends on, the verifier state aside."""

    definition: int = DEFINITION
    """argmax(softcap(scale * head(final_norm(state)))), the first of equals, in products of a fixed number of rows."""
    head_file: str
    """xxh3-128 of target/head.safetensors: embedding, head and the norm's parameters."""
    final_norm: str
    """The norm's class."""
    final_norm_eps: float | None
    """Its epsilon."""
    tied_embeddings: bool
    """The head is the embedding."""
    logit_scale: float
    """Of the logits."""
    logit_softcap: float | None
    """Of the logits."""
    products: Literal["bfloat16", "float32"]
    """Type of the product with the head. Another one may decide near ties otherwise."""
    device: str = Field(pattern="[a-z]+")
    """Kind of device, cpu or cuda; likewise."""

    @property
    def fingerprint(self) -> str:
        """sha256 of all of it: the name of the folder."""
        return fingerprint(self.model_dump(mode="json"))

    def __str__(self) -> str:
        return f"head {self.fingerprint[:12]}, {self.products} on {self.device}"


def head_identity(cache: Path, spec: CacheSpec, products: str, device: str) -> HeadIdentity:
    """That of a cache's head. The file itself is not read: whoever loads it checks it against the same seal.

    Raises CacheDamaged when the seal is missing or was changed.
    """
    target, entry = spec.settings.target, target_folder.read_seal(cache).get(layout.HEAD_FILE)
    if not isinstance(entry, dict) or not isinstance(entry.get("xxh3_128"), str):
        raise CacheDamaged("is not in the seal", place=str(cache / layout.TARGET / layout.HEAD_FILE))
    return HeadIdentity(
        head_file=entry["xxh3_128"],
        final_norm=target.final_norm,
        final_norm_eps=target.final_norm_eps,
        tied_embeddings=target.tied_embeddings,
        logit_scale=target.logit_scale,
        logit_softcap=target.logit_softcap,
        products=products,  # type: ignore[arg-type]  # checked by the model
        device=device,
    )


class TargetsManifest(Config):
    """The `dflash_targets` attribute of a group."""

    head: HeadIdentity
    part: str
    """Name of the part that it belongs to."""
    part_digest: str
    """That part's own digest: of all its files, states and masks included."""
    tokens: int = Field(gt=0)
    """Rows (T)."""
    known: int = Field(ge=0)
    """Rows that have a token."""
    files: dict[str, FileEntry]
    """Every other file of the group by its path inside it."""
    digest: str = ""
    """xxh3-128 of the canonical JSON of this document without this field."""


@dataclass(frozen=True)
class Targets:
    """A group whose manifest is sound."""

    path: Path
    manifest: TargetsManifest

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its files, the manifest's own aside."""
        return sum(entry.size for entry in self.manifest.files.values())

    def read(self, vocab: int) -> np.ndarray:
        """int32 [T], read-only, after checking every file. Raises CacheDamaged, naming it."""
        data = {name: self._checked(name) for name in FILES}[ARRAY_FILE]
        place, body = str(self.path / ARRAY_FILE), data[:-CHECKSUM_BYTES]
        if len(body) != 4 * self.manifest.tokens or crc32c.crc32c(body).to_bytes(CHECKSUM_BYTES, "little") != data[-CHECKSUM_BYTES:]:
            raise CacheDamaged("the array has another size or checksum than its manifest says", place=place, fix=AGAIN)
        tokens = np.frombuffer(body, "<i4")
        if tokens.min() < UNKNOWN or tokens.max() >= vocab or int((tokens != UNKNOWN).sum()) != self.manifest.known:
            raise CacheDamaged("holds what are no tokens, or another number of them than its manifest says", place=place, fix=AGAIN)
        return tokens

    def _checked(self, name: str) -> bytes:
        path, entry = self.path / name, self.manifest.files[name]
        try:
            status = path.lstat()
            behind_link = any((self.path / parent).is_symlink() for parent in path.relative_to(self.path).parents)
            if not stat.S_ISREG(status.st_mode) or behind_link:
                raise CacheDamaged("is no plain file", place=str(path), fix=AGAIN)
            if status.st_size != entry.size:
                raise CacheDamaged("has another size than when it was written", place=str(path), found=status.st_size, fix=AGAIN)
            data = path.read_bytes()
        except OSError as error:
            raise CacheDamaged(f"cannot be read: {error.strerror}", place=str(path), fix=AGAIN) from None
        if digest_bytes(data) != entry.xxh3_128:
            raise CacheDamaged("is not as it was written: its digest does not match", place=str(path), fix=AGAIN)
        return data


def find(path: Path) -> Targets:
    """The group at `path`, its manifest checked against itself and its place; its array is not read. Raises CacheDamaged."""
    place = str(path / layout.ZARR_JSON)
    for folder in (path.parent.parent, path.parent, path):
        if folder.is_symlink() or not folder.is_dir():
            raise CacheDamaged("is no plain folder", place=str(folder), fix=AGAIN)
    data, document = read_bounded(path / layout.ZARR_JSON, AGAIN)
    try:
        manifest = TargetsManifest.model_validate(document["attributes"][ATTRIBUTE])
    except (KeyError, TypeError, ValidationError):
        raise CacheDamaged("has no manifest of targets in its attributes", place=place, fix=AGAIN) from None
    if data != _group_document(manifest) or set(manifest.files) != set(FILES):
        raise CacheDamaged("the manifest was changed", place=place, fix=AGAIN)
    if (path.parent.name, path.name) != (manifest.head.fingerprint, manifest.part):
        raise CacheDamaged("was renamed", place=str(path), expected=f"{manifest.head.fingerprint}/{manifest.part}", fix=AGAIN)
    return Targets(path, manifest)


def scan(cache: Path) -> tuple[list[Path], list[Path]]:
    """(groups, whatever else stands under `targets/`), each in order of names; what begins with a dot is being written, and left out."""
    root = cache / layout.TARGETS
    if not os.path.lexists(root):
        return [], []
    if root.is_symlink() or not root.is_dir():
        return [], [root]
    groups: list[Path] = []
    odd: list[Path] = []
    for head in sorted(root.iterdir()):
        if head.is_symlink() or not head.is_dir() or len(head.name) != 64:
            odd.append(head)
            continue
        for path in sorted(head.iterdir()):
            if layout.parse_part_name(path.name) is not None:
                groups.append(path)
            elif not path.name.startswith("."):
                odd.append(path)
    return groups, odd


def write(folder: Path, tokens: np.ndarray, head: HeadIdentity, part: str, part_digest: str) -> Targets:
    """Make the group in `folder`, which is not there: int32 [T], UNKNOWN where there is no token. Raises OSError."""
    import zarr
    from zarr.codecs import Crc32cCodec

    array = zarr.create_group(folder).create_array(
        layout.TEACHER_TOKENS,
        shape=tokens.shape,
        dtype="int32",
        chunks=tokens.shape,
        compressors=[Crc32cCodec()],
        filters=None,
        fill_value=UNKNOWN,
        dimension_names=("token",),
        config={"write_empty_chunks": True},
    )
    array[...] = tokens
    found = {name: digest_file(folder / name) for name in FILES}
    files = {name: FileEntry(size=size, xxh3_128=digest) for name, (size, digest) in found.items()}
    known = int((tokens != UNKNOWN).sum())
    manifest = TargetsManifest(head=head, part=part, part_digest=part_digest, tokens=len(tokens), known=known, files=files)
    (folder / layout.ZARR_JSON).write_bytes(_group_document(manifest))
    return Targets(folder, manifest)


def _group_document(manifest: TargetsManifest) -> bytes:
    body = manifest.model_dump(mode="json", exclude={"digest"})
    body["digest"] = digest_bytes(canonical(body))
    return canonical({"zarr_format": 3, "node_type": "group", "attributes": {ATTRIBUTE: body}})
