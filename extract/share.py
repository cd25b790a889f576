"""Which documents are this extraction's, when several with ranks of their own share the work.

Every rank reads all rows and so knows all documents; the seeded order is dealt to the ranks one by one.
"""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass, field

from .document_store import DocumentStore


@dataclass(frozen=True)
class Share:
    """One rank's part of the documents."""

    numbers: list[int]
    """In the order in which they are to be computed."""
    left_to_others: int = 0
    """Samples of the other ranks."""
    places_of_others: frozenset[tuple[str, int]] = field(default=frozenset())
    """Source and row of those."""


def share_of(documents: DocumentStore, seed: int, rank: int, world_size: int) -> Share:
    """The share of `rank`."""
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    mine = order[rank::world_size]
    if world_size == 1:
        return Share(mine)
    others = [number for position, number in enumerate(order) if position % world_size != rank]
    return Share(mine, sum(len(documents.keys(number)) for number in others), frozenset(map(documents.place, others)))


@dataclass(frozen=True)
class OwnRows:
    """The rows whose rejects this rank knows: those that were looked at and hold no document of another rank."""

    looked_at: Container[tuple[str, int]]
    share: Share

    def __contains__(self, place: object) -> bool:
        return place in self.looked_at and place not in self.share.places_of_others
