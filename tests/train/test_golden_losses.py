"""A 50-step run on the CPU whose losses are kept: a refactor must not move them.

python tests/train/test_golden_losses.py     rewrites golden/losses.json, after a change of computation that is meant
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from builders import make_sample, make_spec, write_target_files

from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.run import run

GOLDEN = Path(__file__).parents[1] / "golden/losses.json"


def fifty_losses(folder: Path) -> list[float]:
    """Loss of each of 50 steps in float32, on a cache written here."""
    spec = make_spec()
    open_cache(folder / "cache", spec)
    write_target_files(folder / "cache", spec)
    writer = CacheWriter(folder / "cache", spec)
    for number in range(12):
        writer.add(make_sample(number, 10 + 3 * number, spec, next_token=5 if number % 2 else -1))
    writer.close()
    config = TrainConfig.model_validate(
        {
            "data": {"row_tokens": 64},
            "model": {"block_size": 4, "num_layers": 2, "mask_token_id": 0},
            "loss": {"anchors_per_row": 16, "feature_noise": 0.05},
            "optim": {"steps": 50, "lr": 3e-3, "accumulate_rows": 2},
            "run": {"device": "cpu", "dtype": "float32", "trackers": (), "log_every": 1},
        }
    )
    run(config, [folder / "cache"], folder / "run")
    return [json.loads(line)["loss"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_fifty_steps_give_the_losses_that_they_always_gave(tmp_path: Path) -> None:
    """Not bit for bit, because processors differ in the order of sums; a changed computation moves them far more."""
    assert fifty_losses(tmp_path) == pytest.approx(json.loads(GOLDEN.read_text()), rel=2e-4)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        GOLDEN.write_text(json.dumps(fifty_losses(Path(name))) + "\n")
