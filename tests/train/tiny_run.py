"""The configuration of a training run that takes a second."""

from __future__ import annotations

from typing import Any

from dflash_cache.train.config import TrainConfig

TINY: dict[str, dict[str, Any]] = {
    "data": {"row_tokens": 64},
    "model": {"block_size": 4, "num_layers": 1, "mask_token_id": 0},
    "optim": {"steps": 4},
    "run": {"device": "cpu", "dtype": "float32", "trackers": (), "checkpoint_every": 2, "log_every": 1},
}


def config(**sections: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate({name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {*TINY, *sections}})
