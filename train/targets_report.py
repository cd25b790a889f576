"""What targets a cache holds, head by head, as `inspect`, `verify` and `train --dry-run` tell it. Reads manifests alone; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..common.errors import CacheDamaged
from .reader import CacheReader
from .targets import Targets, find, head_identity, scan


@dataclass(frozen=True)
class KeptTargets:
    """The targets by one head. `parts` of the cache's `of_parts` have them; those of a part that is gone or was replaced are stale."""

    cache: str
    head: str
    """Fingerprint; the folder under targets/."""
    products: str
    device: str
    usable: bool
    """By the head that the cache has now."""
    parts: int
    of_parts: int
    stale: int
    damaged: int
    """Groups whose manifest is not as it was written."""
    tokens: int
    """Rows that have a teacher token."""
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def __str__(self) -> str:
        rest = [f"{count} {what}" for count, what in ((self.stale, "stale"), (self.damaged, "damaged")) if count]
        text = f"{self.parts} of {self.of_parts} parts, {self.tokens:,} tokens, {self.bytes:,} bytes ({self.products} on {self.device}, head {self.head[:12]})"
        return text + (f"; {', '.join(rest)}" if rest else "") + ("" if self.usable else "; of another head")


def kept_targets(reader: CacheReader) -> list[KeptTargets]:
    """One line for each head that any targets of the cache name."""
    groups: dict[str, list[Targets | CacheDamaged]] = {}
    for path in scan(reader.path)[0]:
        groups.setdefault(path.parent.name, []).append(_look_at(path))
    digests = {part.path.name: part.manifest.digest for part in reader.parts}
    return [_summary(reader.path, head, found, digests, _identity_now(reader, found)) for head, found in groups.items()]


def _look_at(path: Path) -> Targets | CacheDamaged:
    """The group at `path`, or what is wrong with it."""
    try:
        return find(path)
    except CacheDamaged as error:
        return error


def _summary(cache: Path, fingerprint: str, found: Sequence[Targets | CacheDamaged], digests: Mapping[str, str], now: str) -> KeptTargets:
    sound = [one for one in found if isinstance(one, Targets)]
    current = [one for one in sound if digests.get(one.manifest.part) == one.manifest.part_digest]
    head = sound[0].manifest.head if sound else None
    return KeptTargets(
        cache=str(cache),
        head=fingerprint,
        products=head.products if head else "?",
        device=head.device if head else "?",
        usable=fingerprint == now,
        parts=len(current),
        of_parts=len(digests),
        stale=len(sound) - len(current),
        damaged=len(found) - len(sound),
        tokens=sum(one.manifest.known for one in current),
        bytes=sum(one.stored_bytes for one in current),
    )


def _identity_now(reader: CacheReader, found: Sequence[Targets | CacheDamaged]) -> str:
    """The fingerprint that the cache's head has now, in the types and on the kind of device of `found`; empty where it has none."""
    made = next((one.manifest.head for one in found if isinstance(one, Targets)), None)
    try:
        return head_identity(reader.path, reader.spec, made.products, made.device).fingerprint if made is not None else ""
    except CacheDamaged:
        return ""
