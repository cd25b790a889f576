"""Copies of rows on a CPU against plain loops over the cache; memory that is full holds requests back and loses none.

Streams and events need a GPU: benchmarks/gpu_check.py and benchmarks/extraction.py.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from dflash_cache.extract import row_copies as module
from dflash_cache.extract.arena import ALIGNMENT, Arena
from dflash_cache.extract.row_copies import FinishedRequest, RowCopies, Rows

BLOCK, COLUMNS, WIDTH, BLOCKS = 4, 3, 8, 40


def read(cache: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
    """As vLLM's `extract_from_kv_cache` does."""
    return cache[slots // BLOCK, :, slots % BLOCK][:count]


@pytest.fixture
def cache() -> torch.Tensor:
    """[blocks, C, tokens of a block, H] with tokens outermost in memory, as vLLM lays it out."""
    return torch.randn(BLOCKS, BLOCK, COLUMNS, WIDTH, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).transpose(1, 2)


def slowly(cache: torch.Tensor, request: FinishedRequest) -> np.ndarray:
    """Row by row: the twin."""
    count = min(len(request.token_ids), request.computed, len(request.block_ids) * BLOCK)
    rows = [
        [cache[request.block_ids[t // BLOCK], c, t % BLOCK].view(torch.int16).numpy().view(np.uint16) for c in range(COLUMNS)] for t in range(count)
    ]
    return np.array(rows, np.uint16).reshape(count, COLUMNS, WIDTH)


def taken(copies: RowCopies, key: str) -> Rows:
    """Once it is checked."""
    until = time.monotonic() + 10
    while (rows := copies.take(key)) is None:
        assert time.monotonic() < until
    return rows


@pytest.mark.parametrize("piece_bytes", [1, 5 * COLUMNS * WIDTH * 2, 64 << 20])
def test_copied_rows_are_those_of_the_cache_block_by_block(cache: Any, monkeypatch: pytest.MonkeyPatch, piece_bytes: int):
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    copies = RowCopies(cache, BLOCK, COLUMNS, WIDTH, 100, read)
    rng = random.Random(0)
    requests = []
    for number in range(8):
        blocks = rng.sample(range(BLOCKS), 4)
        length = rng.randint(1, 18)
        requests.append(FinishedRequest(f"r{number}", f"k{number}", list(range(length)), rng.choice([length, length - 1]), blocks))
    copies.submit(requests)
    assert copies.take("k0") is None  # not before its copy has begun
    copies.advance()
    assert copies.landed() == {f"r{number}" for number in range(8)}
    assert copies.landed() == set()
    for request in requests:
        rows = taken(copies, request.key)
        assert np.array_equal(rows.bits_TCH, slowly(cache, request))
        assert (rows.token_ids, rows.bad) == (request.token_ids, None)
        rows.release()
    assert copies.take("k0") is None
    assert copies._arena.used == 0
    copies.close()


def test_while_memory_is_full_requests_wait_with_their_blocks_in_their_order(cache: Any):
    copies = RowCopies(cache, BLOCK, COLUMNS, WIDTH, 8, read)
    copies._arena = Arena(2 * ALIGNMENT)
    requests = [FinishedRequest(f"r{number}", f"k{number}", [0] * 5, 5, [2 * number, 2 * number + 1]) for number in range(4)]
    copies.submit(requests)
    copies.advance()
    assert copies.landed() == {"r0", "r1"}
    assert copies.held_back
    first = taken(copies, "k0")
    copies.advance()
    assert copies.landed() == set()  # taken, but the writer still reads it
    assert copies.take("k2") is None
    before = first.bits_TCH.copy()
    assert np.array_equal(before, slowly(cache, requests[0]))
    first.release()
    copies.advance()
    assert copies.landed() == {"r2"}
    taken(copies, "k1").release()
    copies.advance()
    assert copies.landed() == {"r3"}
    assert not copies.held_back
    for request in requests[2:]:
        assert np.array_equal(taken(copies, request.key).bits_TCH, slowly(cache, request))


def test_a_state_that_is_not_finite_is_named_by_its_token(cache: Any):
    cache[7, 1, 2, 3] = float("inf")
    copies = RowCopies(cache, BLOCK, COLUMNS, WIDTH, 8, read)
    copies.submit([FinishedRequest("r", "k", [0] * 8, 8, [3, 7]), FinishedRequest("s", "l", [0] * 8, 6, [3, 7])])
    copies.advance()
    assert taken(copies, "k").bad == "states are infinite or NaN, first at token 6"
    assert taken(copies, "l").bad is None  # only six of its rows were computed


def test_states_of_another_shape_are_an_error_that_names_both(cache: Any):
    copies = RowCopies(cache, BLOCK, COLUMNS + 1, WIDTH, 8, read)
    copies.submit([FinishedRequest("r", "k", [0] * 5, 5, [0, 1])])
    with pytest.raises(ValueError, match=r"states of shape \(5, 3, 8\) came out of the KV cache; expected \(5, 4, 8\)"):
        copies.advance()


def test_the_memory_holds_the_longest_document(cache: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "ARENA_BYTES", 1)
    copies = RowCopies(cache, BLOCK, COLUMNS, WIDTH, 160, read)
    copies.submit([FinishedRequest("r", "k", [0] * 160, 160, list(range(BLOCKS)))])
    copies.advance()
    assert len(taken(copies, "k").bits_TCH) == 160
