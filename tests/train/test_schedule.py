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


def test_a_line_falls_evenly_to_the_floor():
    config = OptimConfig(lr=1.0, warmup_ratio=0.2, schedule="linear", min_lr_ratio=0.5)
    assert [lr_at(step, 10, config) for step in (0, 1, 2, 6, 10)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5])


def test_wsd_stays_at_the_peak_until_the_last_part_and_falls_as_one_minus_root():
    config = OptimConfig(lr=1.0, warmup_ratio=0.1, schedule="wsd", decay_ratio=0.4)
    assert [lr_at(step, 10, config) for step in range(1, 7)] == [1.0] * 6
    assert [lr_at(step, 10, config) for step in (7, 8, 9, 10)] == pytest.approx([1 - (k / 4) ** 0.5 for k in (1, 2, 3, 4)])


def test_wsd_has_room_for_both_of_its_ends():
    with pytest.raises(ValueError, match="exceed 1 together"):
        OptimConfig(schedule="wsd", warmup_ratio=0.5, decay_ratio=0.6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_no_step_of_any_schedule_has_rate_zero_or_more_than_the_peak(schedule):
    for total in (1, 2, 3, 50):
        rates = [lr_at(step, total, OptimConfig(lr=1.0, schedule=schedule)) for step in range(total)]
        assert 0 < min(rates) <= max(rates) <= 1
