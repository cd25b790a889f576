"""What one writer has published, read back from its parts: after its process died, only this is certain."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..common import layout, manifest
from ..common.manifest import PartManifest
from ..common.sample import NO_TOKEN
from ..common.small_arrays import read_small
from ..common.spec import CacheSpec
from .engine import WriterCounts


@dataclass(frozen=True)
class PublishedSample:
    """One sample of a part."""

    tokens: int
    supervised_tokens: int
    engine_top1: int


def parts_of(cache: Path, writer_id: int) -> list[Path]:
    """The published parts of one writer."""
    return [part for part in manifest.list_parts(cache) if (layout.parse_part_name(part.name) or (0, -1))[1] == writer_id]


def read_published(cache: Path, spec: CacheSpec, writer_id: int, before: Collection[str]) -> tuple[dict[bytes, PublishedSample], WriterCounts]:
    """The samples by key, and the counts, of the writer's parts whose names are not in `before`. Raises CacheDamaged."""
    samples: dict[bytes, PublishedSample] = {}
    tokens = stored_bytes = parts = 0
    for part in parts_of(cache, writer_id):
        if part.name in before:
            continue
        found = manifest.load(part, spec)
        samples.update(_samples(part, found, spec))
        tokens, stored_bytes, parts = tokens + found.tokens, stored_bytes + found.stored_bytes, parts + 1
    return samples, WriterCounts(len(samples), tokens, stored_bytes, parts)


def _samples(part: Path, found: PartManifest, spec: CacheSpec) -> Iterator[tuple[bytes, PublishedSample]]:
    names = ("sample_key", "sample_offsets", "loss_mask", "next_token", "engine_top1")
    keys, offsets, mask, following, top1 = (read_small(part, found, spec, name) for name in names)
    supervised = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    for number, (start, end) in enumerate(pairwise(offsets.tolist())):
        learned = int(supervised[end] - supervised[start]) + int(following[number] != NO_TOKEN)
        yield keys[number].tobytes(), PublishedSample(end - start, learned, int(top1[number]))
