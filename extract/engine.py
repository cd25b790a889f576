"""What the two engines share: what they are asked, what they answer, and the face that `run` sees.

An engine computes documents and puts them into the cache itself, so that features never pass through here. What comes
back is an Outcome per document: stored or rejected, and the last row's verifier state for the fidelity check.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from ..common.spec import CacheSpec
from .config import ExtractConfig
from .script import Script
from .target import Target


@dataclass(frozen=True, eq=False)
class Document:
    """One conversation, tokenized. With generation it is only the first prompt. T tokens."""

    key: bytes
    """16 bytes: content hash of what is fed to the target. The first of `keys`."""
    source: str
    """The dataset, as the user named it."""
    source_row: int
    """0-based row in it."""
    input_ids: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """uint8 [T]; for a prompt all 0, or all 1 where every token is learned from."""
    script: Script | None = None
    """All turns, where the target writes the answers of several; None otherwise."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Of the samples that it gives: one, unless several of its turns end samples of their own. Each has an Outcome."""
        return (self.key,) if self.script is None else self.script.stored

    def wanting(self, keys: Collection[bytes]) -> Document:
        """The same for the samples of these keys alone."""
        if self.script is None or len(keys) == len(self.keys):
            return self
        script = self.script.wanting(keys)
        return replace(self, key=script.stored[0], script=script)


def merged(documents: Iterable[Document]) -> list[Document]:
    """`documents`, those together that are of one conversation."""
    found: dict[object, Document] = {}
    for document in documents:
        script = document.script
        place: object = document.key if script is None else (document.source, document.source_row, script.keys)
        if script is not None and (earlier := found.get(place)) is not None:
            both = script.wanting({*earlier.keys, *document.keys})
            document = replace(document, key=both.stored[0], script=both)
        found[place] = document
    return list(found.values())


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of one sample of a document."""

    document: Document
    """With the sample's key."""
    tokens: int = 0
    """Rows stored."""
    supervised_tokens: int = 0
    """Of them, those that may be learned from; a generated `next_token` counts."""
    engine_top1: int = -1
    """The engine's most likely token after the last row."""
    verifier_bits_H: np.ndarray | None = None
    """uint16 [H]: bfloat16 pattern of the last row's verifier state. None when rejected."""
    reject: str | None = None
    """Why it was not stored."""
    generated_tokens: int = 0
    """Tokens that the target wrote for it, those of earlier turns that end no sample included."""
    notes: tuple[str, ...] = ()
    """What happened to it that is no reason to reject it."""


@dataclass(frozen=True)
class WriterCounts:
    """What the writer has published and what it still holds."""

    samples: int = 0
    tokens: int = 0
    stored_bytes: int = 0
    parts: int = 0
    """Published."""
    pending_tokens: int = 0
    """Accepted and not published yet."""


@dataclass(frozen=True)
class EngineJob:
    """All that an engine needs to know."""

    config: ExtractConfig
    target: Target
    cache: Path
    spec: CacheSpec
    stop_token_ids: tuple[int, ...] = field(default=())
    """Any of them ends a generated answer."""
    writer_id: int = 0
    """Whose parts the engine writes."""


class Engine(Protocol):
    """Runs the target over documents. Use: start (the constructor), `run` once, then `close`."""

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        """Compute and store `documents`; yields Outcomes as they come, in any order, each of a document's `keys` exactly once.

        An empty list is a sign of life: a turn was answered that ends no sample.

        Raises RunFailed when the engine dies or stalls, DiskFull when the cache finds no space.
        """

    def counts(self) -> WriterCounts:
        """As of the last Outcome."""

    def close(self, *, publish: bool) -> WriterCounts:
        """Publish the pending part, or drop it, and let go of everything. Harmless when called twice."""
