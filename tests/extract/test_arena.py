"""Ranges of one block of memory: never two at one place, and a gap is found as soon as it is there."""

from __future__ import annotations

import random

import pytest

from dflash_cache.extract.arena import ALIGNMENT, Arena


def test_ranges_follow_each_other_and_a_gap_is_filled_first():
    arena = Arena(4 * ALIGNMENT)
    assert [arena.take(size) for size in (1, 2 * ALIGNMENT, ALIGNMENT)] == [0, ALIGNMENT, 3 * ALIGNMENT]
    assert arena.take(1) is None
    arena.give_back(ALIGNMENT)
    assert arena.take(2 * ALIGNMENT + 1) is None
    assert arena.take(ALIGNMENT) == ALIGNMENT
    assert arena.take(ALIGNMENT) == 2 * ALIGNMENT
    assert arena.used == 4


def test_what_is_as_large_as_the_arena_fits_once_it_is_empty():
    arena = Arena(3 * ALIGNMENT + 5)
    first = arena.take(1)
    assert arena.take(arena.capacity) is None
    arena.give_back(first)
    assert arena.take(arena.capacity) == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_two_ranges_ever_overlap(seed):
    rng, arena, held = random.Random(seed), Arena(64 * ALIGNMENT), {}
    for _ in range(500):
        if held and rng.random() < 0.45:
            offset = rng.choice(list(held))
            arena.give_back(offset)
            del held[offset]
            continue
        size = rng.randint(1, 12 * ALIGNMENT)
        offset = arena.take(size)
        if offset is None:
            continue
        assert offset + size <= arena.capacity
        assert all(offset + size <= other or other + other_size <= offset for other, other_size in held.items())
        held[offset] = size
    for offset in held:
        arena.give_back(offset)
    assert arena.used == 0
    assert arena.take(arena.capacity) == 0
