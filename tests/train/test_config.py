"""TrainConfig: defaults, refusals, and that `--dry-run` stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dflash_cache.common.config import load
from dflash_cache.common.errors import InputError
from dflash_cache.train.config import TrainConfig


def test_the_default_gamma_is_4():
    assert TrainConfig().loss.gamma == 4.0


def test_an_unknown_field_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"model\.blok_size: no such field; known here: .*block_size"):
        load(TrainConfig, file=None, overrides=["model.blok_size=8"])


def test_all_problems_are_reported_at_once():
    with pytest.raises(InputError, match="3 problems"):
        load(TrainConfig, file=None, overrides=["model.block_size=1", "loss.gamma=0", "optim.lr=-1"])


def test_scientific_notation_without_a_point_is_a_number():
    assert load(TrainConfig, file=None, overrides=["optim.lr=3e-4"]).optim.lr == 3e-4


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.sliding_window=4"],
        ["model.num_layers=2", "model.layer_types=[sliding_attention, full_attention]"],
        ["model.num_layers=2", "model.layer_types=[full_attention]"],
        ["model.head_dim=7"],
        ["optim.betas=[0.9, 1.0]"],
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str]):
    with pytest.raises(InputError):
        load(TrainConfig, file=None, overrides=overrides)


def test_resolving_a_run_imports_no_torch():
    code = "import sys, dflash_cache.train.resolve, dflash_cache.train.run, dflash_cache.train.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
