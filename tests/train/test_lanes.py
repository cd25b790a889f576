"""Lanes: pools dealt, rows put back by turns, and chunks that hardly any two processes share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loader import LENGTHS, make_loader

from dflash_cache.train.config import OptimConfig
from dflash_cache.train.lanes import deal, interleave, order
from dflash_cache.train.packer import RowPlan, pack, row_sizes
from dflash_cache.train.scatter import Scatter
from dflash_cache.train.work import Position, work


def plan(*rows: list[int]) -> RowPlan:
    return RowPlan(np.array([sample for row in rows for sample in row], np.int64), np.cumsum([0, *map(len, rows)]))


def rows_of(found: RowPlan) -> list[list[int]]:
    return [found.row(number).tolist() for number in range(len(found))]


def test_a_pool_goes_to_the_lane_with_the_fewest_tokens():
    pools = [np.array([0]), np.array([1]), np.array([2, 3]), np.array([4])]
    assert [lane.tolist() for lane in deal(pools, np.array([30, 10, 5, 5, 5]), 2)] == [[0], [1, 2, 3, 4]]
    assert [lane.tolist() for lane in deal(pools, np.ones(5, np.int64), 1)] == [[0, 1, 2, 3, 4]]
    assert [len(lane) for lane in deal(pools, np.ones(5, np.int64), 6)] == [1, 1, 2, 1, 0, 0]


def test_lanes_take_turns_and_those_that_end_are_passed_over():
    lanes = [plan([1, 2], [3], [4]), plan([5]), plan([6, 7, 8], [9])]
    assert rows_of(interleave(lanes)) == [[1, 2], [5], [6, 7, 8], [3], [9], [4]]
    assert order([3, 1, 2]).tolist() == [0, 3, 4, 1, 5, 2]
    assert rows_of(interleave([plan(), plan([1])])) == [[1]]


@pytest.mark.parametrize("lanes", [1, 2, 3, 40])
def test_with_any_number_of_lanes_an_epoch_reads_every_sample_once_and_repeats(write_cache, lanes):
    cache, _, _ = write_cache(lengths=LENGTHS * 12, part_tokens=400)
    loader = make_loader(cache, lanes=lanes)
    rows = [batch.sample_ids for batch in loader.epoch(2)]
    assert sorted(sample for row in rows for sample in row) == [(0, number) for number in range(len(LENGTHS) * 12)]
    assert [batch.num_tokens for batch in loader.epoch(2)] == loader.tokens_per_row(2)
    assert len(rows) == loader.rows_per_epoch(2)
    assert [batch.sample_ids for batch in make_loader(cache, lanes=lanes).epoch(2, 5)] == rows[5:]


@pytest.mark.parametrize("optim", [{"accumulate_rows": 4}, {"accumulate_rows": 3}, {"accumulate_tokens": 150}])
def test_with_a_lane_each_processes_decode_no_chunk_twice_but_where_stretches_meet(write_cache, optim):
    """Counted, not decoded: the tasks of all processes over the chunks of the cache."""
    cache, _, _ = write_cache(lengths=np.random.default_rng(0).integers(5, 30, 1500).tolist(), part_tokens=4000)

    def decoded(lanes: int, size: int) -> float:
        loader = make_loader(cache, lanes=lanes, buffer_bytes=1 << 17)
        chunks, tasks = sum(part.manifest.num_chunks for part in loader._readers[0].parts), 0
        for rank in range(size):
            numbers = _Numbers(loader)
            mine = [row for step in work(numbers, Position(), OptimConfig(epochs=1.0, **optim), rank, size) for _, row in step.mine]
            places = {"cache": loader._cache_of, "part": loader._parts, "start": loader._starts, "length": loader._lengths}
            scatter = Scatter(loader._planned(0)[1].only(mine), 64, **places, chunk_tokens=loader._chunks)
            tasks += sum(len(scatter.tasks(pool, 0)) for pool in loader._pools(0))
        return tasks / chunks

    alone = decoded(4, 1)
    assert alone < 1.15
    assert decoded(4, 4) < 1.05 * alone
    assert decoded(4, 2) < 1.05 * alone
    assert decoded(1, 4) > 1.4


class _Numbers:
    """A loader's rows without what they hold."""

    def __init__(self, loader) -> None:
        self.rows_per_epoch, self.tokens_per_row = loader.rows_per_epoch, loader.tokens_per_row

    def epoch(self, epoch, start_row=0, rows=None):
        return iter(range(start_row, self.rows_per_epoch(epoch)) if rows is None else rows)


@given(
    sizes=st.lists(st.integers(1, 40), max_size=60),
    row_tokens=st.integers(1, 40),
    open_rows=st.integers(1, 5),
    seed=st.integers(0, 9),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_packing_is_that_of_the_plain_loop_over_open_rows(sizes, row_tokens, open_rows, seed):
    samples, lengths = np.random.default_rng(seed).permutation(len(sizes)), np.array(sizes, np.int64)
    found, wanted = pack(samples, lengths, row_tokens, open_rows), plain_pack(samples.tolist(), sizes, row_tokens, open_rows)
    assert rows_of(found) == wanted
    assert row_sizes(samples, lengths, row_tokens, open_rows).tolist() == [sum(min(sizes[s], row_tokens) for s in row) for row in wanted]


def plain_pack(samples: list[int], sizes: list[int], row_tokens: int, open_rows: int) -> list[list[int]]:
    """The slow twin: the fullest open row with room is looked for, one after the other; among equals the one that was used last."""
    closed: list[list[int]] = []
    partly: list[tuple[int, list[int]]] = []
    for sample in samples:
        size = min(sizes[sample], row_tokens)
        at = next((at for at, (room, _) in enumerate(partly) if room >= size), None)
        left, row = (row_tokens, []) if at is None else partly.pop(at)
        left, row = left - size, [*row, sample]
        if not left:
            closed.append(row)
            continue
        partly.insert(next((at for at, (room, _) in enumerate(partly) if room >= left), len(partly)), (left, row))
        if len(partly) > open_rows:
            closed.append(partly.pop(0)[1])
    return closed + [row for _, row in partly]
