"""The running mean of the weights: its numbers, and who takes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import settings, train, write

from dflash_cache.common.errors import RunFailed
from dflash_cache.train import checkpoint
from dflash_cache.train.ema import WeightMean
from dflash_cache.train.export import load_drafter


def test_the_mean_is_the_one_made_by_hand():
    """One weight: 0 at first, then 1, 2, 3. Decay min(0.5, (1 + t) / (10 + t)): 2/11, 3/12, 4/13."""
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    mean, by_hand = WeightMean(module, 0.5), 0.0
    for step, decay in ((1, 2 / 11), (2, 3 / 12), (3, 4 / 13)):
        torch.nn.init.constant_(module.weight, step)
        mean.update(step)
        by_hand = decay * by_hand + (1 - decay) * step
        assert float(mean.tensors["weight"]) == pytest.approx(by_hand, rel=1e-6)
    for step in range(20, 40):
        mean.update(step)
    assert float(mean.tensors["weight"]) == pytest.approx(3 + 0.5**20 * (by_hand - 3), rel=1e-6)


def test_a_mean_that_does_not_fit_is_refused():
    with pytest.raises(RunFailed, match=r"does not fit.*\n.*weight"):
        WeightMean(torch.nn.Linear(2, 2, bias=False), 0.9).restore({"weight": torch.zeros(3, 2)}, "x")


def test_checkpoints_hold_it_and_evaluation_and_export_take_it(tmp_path: Path):
    cache = write(tmp_path / "cache", [40, 61, 12, 33])
    train(settings(optim={"ema_decay": 0.9}), [cache], tmp_path / "with")
    train(settings(), [cache], tmp_path / "without")
    for name in ("with", "without"):
        folder = checkpoint.newest(tmp_path / name)
        state = checkpoint.load_state(folder)
        weights = checkpoint.load_tensors(folder, state, checkpoint.MODEL)
        served = load_drafter(tmp_path / name).state_dict()
        assert all(torch.equal(served[key], weights[key]) for key in weights) == (name == "without")
        if name == "with":
            means = checkpoint.load_tensors(folder, state, checkpoint.EMA)
            assert all(torch.equal(served[key], means[key]) for key in weights)
    one, other = (checkpoint.newest(tmp_path / name) / checkpoint.MODEL for name in ("with", "without"))
    assert one.read_bytes() == other.read_bytes()  # it changes nothing of the training
