"""Intervals: seeded, over whole documents, and unknown where there is nothing to resample."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_cache.common import bootstrap
from dflash_cache.common.bootstrap import intervals


def columns(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)[:, None]


def slow_interval(above: np.ndarray, below: np.ndarray, resamples: int, seed: int) -> tuple[float, float]:
    """The twin, a loop: one resample at a time."""
    draws = np.random.default_rng(seed).integers(0, len(above), (resamples, len(above)))
    ratios = [above[drawn].sum() / below[drawn].sum() for drawn in draws]
    return float(np.quantile(ratios, 0.025)), float(np.quantile(ratios, 0.975))


def test_it_is_the_percentile_interval_of_resampled_documents():
    seeded = np.random.default_rng(3)
    below, above = seeded.integers(1, 40, 30), seeded.integers(0, 90, 30)
    (found,) = intervals(columns(*above), columns(*below), resamples=200, seed=7)
    assert found == pytest.approx(slow_interval(above, below, 200, 7), abs=1e-12)


def test_blocks_of_draws_change_no_number(monkeypatch: pytest.MonkeyPatch):
    above, below = columns(1, 5, 2, 8, 3), columns(2, 3, 2, 4, 3)
    whole = intervals(above, below, resamples=50, seed=0)
    monkeypatch.setattr(bootstrap, "BLOCK_NUMBERS", 12)
    assert intervals(above, below, resamples=50, seed=0) == whole


def test_documents_that_all_agree_leave_no_doubt():
    assert intervals(columns(2, 4, 6), columns(1, 2, 3), resamples=50, seed=0, offset=1.0) == [(3.0, 3.0)]


def test_it_is_unknown_for_one_document_for_none_and_without_resamples():
    assert intervals(columns(2), columns(1), resamples=50, seed=0) == [None]
    assert intervals(np.zeros((0, 2)), np.zeros((0, 2)), resamples=50, seed=0) == [None, None]
    assert intervals(columns(2, 3), columns(1, 1), resamples=0, seed=0) == [None]
    assert intervals(columns(2, 3), columns(1, 0), resamples=50, seed=0) == [None]


def test_the_seed_decides():
    above, below = columns(1, 5, 2, 8, 3), columns(2, 3, 2, 4, 3)
    assert intervals(above, below, resamples=20, seed=1) == intervals(above, below, resamples=20, seed=1)
    assert intervals(above, below, resamples=20, seed=1) != intervals(above, below, resamples=20, seed=2)
