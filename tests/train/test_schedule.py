"""The learning rate at each step."""

from __future__ import annotations

import pytest

from dflash_cache.train.config import OptimConfig
from dflash_cache.train.schedule import lr_at, warmup_steps


def test_warm_up_rises_from_the_first_step_and_cosine_falls_to_the_floor():
    config = OptimConfig(lr=1.0, warmup_ratio=0.4, min_lr_ratio=0.1)
    rates = [lr_at(step, 10, config) for step in range(11)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.55)
    assert rates[10] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_no_warm_up_and_constant():
    assert lr_at(0, 10, OptimConfig(lr=2.0, warmup_ratio=0.0)) == 2.0
    assert [lr_at(s, 10, OptimConfig(lr=2.0, warmup_ratio=0.1, schedule="constant")) for s in (0, 5, 9)] == [2.0] * 3


def test_the_warm_up_is_rounded_up():
    assert warmup_steps(OptimConfig(warmup_ratio=0.04), 30) == 2
