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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loss.terms={kl: 1}"], "terms kl compare distributions, but label teacher is one token"),
        (["loss.label=data", "loss.terms={ce: 1, reverse-kl: 0.5}"], "terms reverse-kl compare distributions, but label data"),
        (["loss.terms={}"], "at least one term"),
        (["loss.terms={ce: 0}"], "factors above 0"),
        (["loss.terms={ce: .inf}"], "factors above 0"),
        (["loss.terms={mse: 1}"], "ce"),
        (["loss.dpace_alpha=0"], "greater than 0"),
        (["init.target_blocks=[0, 1]"], "target_blocks needs from=target:FOLDER"),
        (["init.from=run", "init.target_blocks=[0, 1]"], "target_blocks needs from=target:FOLDER"),
    ],
)
def test_a_loss_or_a_start_that_makes_no_sense_is_refused(overrides: list[str], said: str):
    with pytest.raises(InputError, match=said):
        load(TrainConfig, file=None, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "factors"),
    [
        ([], {"ce": 1.0}),
        (["loss.label=soft"], {"kl": 1.0}),
        (["loss.label=data", "loss.terms={ce: 1, tv: 0.5}"], {"ce": 1.0, "tv": 0.5}),
        (["loss.label=soft", "loss.terms={ce: 0.1, lk-hybrid: 0.9}"], {"ce": 0.1, "lk-hybrid": 0.9}),
    ],
)
def test_terms_default_to_what_the_label_asks_for(overrides: list[str], factors: dict[str, float]):
    assert load(TrainConfig, file=None, overrides=overrides).loss.factors == factors


def test_a_source_of_weights_is_called_from_on_the_command_line_and_in_files():
    found = load(TrainConfig, file=None, overrides=["init.from=target:/models/x"])
    assert found.model_dump(mode="json")["init"] == {"from": "target:/models/x", "target_blocks": None}
    assert TrainConfig.model_validate(found.model_dump(mode="json")) == found


def test_resolving_a_run_imports_no_torch():
    code = "import sys, dflash_cache.train.resolve, dflash_cache.train.run, dflash_cache.train.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
