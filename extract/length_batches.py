"""Batches of documents of about the same length, so that little is padded; in an order that the seed alone decides.

Looks ahead so many batches, sorts those by length, cuts them, and shuffles them again, because what is written in order of length would
be read in it. Pure: nothing but lengths matters.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import TypeVar

LOOK_AHEAD_BATCHES = 16
"""Documents that are sorted together, in batches."""
BATCH_TOKENS = 16_384
"""A batch has no more tokens than these, padding included, unless it is one document."""

S = TypeVar("S", bound=Sized)


def length_batches(documents: Iterable[S], batch_size: int, seed: int) -> Iterator[list[S]]:
    """Every one of `documents` once, at most `batch_size` together and in each batch as they came; takes no more at once than it looks ahead."""
    upcoming, order = iter(documents), random.Random(seed)
    while window := list(islice(upcoming, batch_size * LOOK_AHEAD_BATCHES)):
        batches: list[list[int]] = [[]]
        for number in sorted(range(len(window)), key=lambda number: len(window[number])):
            if len(batches[-1]) == batch_size or (batches[-1] and (len(batches[-1]) + 1) * len(window[number]) > BATCH_TOKENS):
                batches.append([])
            batches[-1].append(number)
        order.shuffle(batches)
        yield from ([window[number] for number in sorted(batch)] for batch in batches)
