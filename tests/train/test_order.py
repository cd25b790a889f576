"""Windows and packing: every sample once, in a seeded order, rows full and never over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.train.packer import pack
from dflash_cache.train.window import cut_windows, epoch_pools


def windows_of(lengths, window_tokens=64):
    lengths = np.asarray(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    zeros = np.zeros(len(lengths), np.int32)
    return cut_windows(zeros, zeros, starts, window_tokens)


def test_a_sample_belongs_to_the_window_of_its_first_row():
    windows = windows_of([40, 40, 10, 100, 5])  # start at 0, 40, 80, 90, 190
    assert windows.window_of.tolist() == [0, 0, 1, 1, 2]
    assert windows.first.tolist() == [0, 2, 4]
    assert windows.stop.tolist() == [2, 4, 5]


def test_windows_cross_neither_parts_nor_caches():
    starts, parts, caches = np.array([0, 10, 0, 10, 0]), np.array([0, 0, 1, 1, 0]), np.array([0, 0, 0, 0, 1])
    assert cut_windows(caches, parts, starts, 64).window_of.tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_visits_every_sample_exactly_once(shuffle):
    windows = windows_of(np.random.default_rng(0).integers(1, 50, 200))
    pools = epoch_pools(windows, seed=1, epoch=2, pool_windows=3, shuffle=shuffle)
    assert sorted(np.concatenate(pools).tolist()) == list(range(200))


def test_the_order_depends_on_seed_and_epoch_and_nothing_else():
    windows = windows_of([10] * 100)

    def order(**change):
        given = {"seed": 1, "epoch": 0, "pool_windows": 4, "shuffle": True, **change}
        return np.concatenate(epoch_pools(windows, **given)).tolist()

    np.random.seed(3)
    first = order()
    np.random.seed(4)
    assert order() == first
    assert order(epoch=1) != first
    assert order(seed=2) != first
    assert order(shuffle=False) == list(range(100))


def test_packed_rows_by_hand():
    plan = pack(np.arange(6), np.array([6, 5, 4, 3, 1, 12]), row_tokens=10)
    assert [plan.row(i).tolist() for i in range(len(plan))] == [[0, 2], [5], [1, 3, 4]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=300), st.integers(10, 40))
def test_no_row_is_over_full_and_no_sample_is_lost(lengths, row_tokens):
    lengths = np.array(lengths)
    plan = pack(np.random.default_rng(0).permutation(len(lengths)), lengths, row_tokens)
    assert sorted(plan.samples.tolist()) == list(range(len(lengths)))
    for number in range(len(plan)):
        assert np.minimum(lengths[plan.row(number)], row_tokens).sum() <= row_tokens


def test_rows_of_real_lengths_are_well_filled():
    lengths = np.random.default_rng(0).lognormal(5, 0.6, 5000).astype(int).clip(16, 1024)
    plan = pack(np.arange(5000), lengths, 1024)
    assert lengths.sum() / (len(plan) * 1024) > 0.97
