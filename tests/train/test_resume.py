"""A run that is cut short and resumed is the same run: samples, rates, weights, moments, logs, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import settings, train, write

from dflash_cache.train import checkpoint
from dflash_cache.train.config import OptimConfig
from dflash_cache.train.schedule import lr_at

LENGTHS = [40, 61, 12, 33, 50, 9, 44, 38, 27, 56, 20, 63, 31]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("resume") / "cache", LENGTHS)


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    times = ("seconds", "tokens_per_second")
    return [{k: v for k, v in json.loads(line).items() if k not in times} for line in (run / name).read_text().splitlines()]


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "packed": {"data": {"row_tokens": 128}, "optim": {"accumulate_rows": 1}},
    "not packed": {"data": {"row_tokens": 64}},
    "by tokens": {"optim": {"accumulate_rows": None, "accumulate_tokens": 100}},
    "muon, mean, wsd": {"optim": {"name": "muon", "ema_decay": 0.9, "schedule": "wsd", "weight_decay": 0.1}},
    "weights, held out": {"data": {"row_tokens": 64, "weights": (1.5,), "eval_fraction": 0.2}, "eval": {"every": 3}},
    "soft label": {"loss": {"label": "soft", "anchors_per_row": 8, "feature_noise": 0.1}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_steps_are_seven_and_thirteen_more(cache: Path, tmp_path: Path, variant: str):
    """Stopped inside an epoch, with rows read ahead that the first life never used."""
    config = settings(**{**VARIANTS[variant], "optim": {**VARIANTS[variant].get("optim", {}), "steps": 20}})
    train(config, [cache], tmp_path / "straight")
    train(config, [cache], tmp_path / "parts", stop_after=7)
    assert checkpoint.load_state(checkpoint.newest(tmp_path / "parts")).row > 0
    torch.manual_seed(3)
    train(config, [cache], tmp_path / "parts", True)
    assert_same(tmp_path / "straight", tmp_path / "parts")
    assert [line["lr"] for line in lines(tmp_path / "parts", "metrics.jsonl")] == [
        lr_at(step, 20, OptimConfig.model_validate(config["optim"])) for step in range(20)
    ]


def assert_same(one: Path, other: Path) -> None:
    for name in ("samples.jsonl", "metrics.jsonl", "eval.jsonl"):
        assert lines(one, name) == lines(other, name), name
    ends = [checkpoint.newest(run) for run in (one, other)]
    states = [checkpoint.load_state(end) for end in ends]
    assert states[0] == states[1]
    for name in states[0].files:
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes(), name
    moments = checkpoint.load_tensors(ends[0], states[0], checkpoint.OPTIMIZER)
    assert all(bool(tensor.any()) for name, tensor in moments.items() if not name.startswith("step."))


@pytest.mark.parametrize("stop", [1, 2])
def test_a_run_that_ended_with_an_epoch_reads_the_whole_next_one(cache: Path, tmp_path: Path, stop: int):
    """Three epochs, a step each epoch's worth of rows: every checkpoint stands at an epoch's end."""
    rows = len(LENGTHS)
    config = settings(data={"row_tokens": 20}, optim={"steps": None, "epochs": 3.0, "accumulate_rows": rows})  # every document fills a row
    assert train(config, [cache], tmp_path / "straight")["steps"] == 3 * len(lines(tmp_path / "straight", "samples.jsonl")) // 3
    train(config, [cache], tmp_path / "parts", stop_after=stop)
    assert train(config, [cache], tmp_path / "parts", True)["steps"] == len(lines(tmp_path / "straight", "samples.jsonl"))
    assert_same(tmp_path / "straight", tmp_path / "parts")
    read = [tuple(sample) for line in lines(tmp_path / "parts", "samples.jsonl") for sample in line["samples"]]
    assert sorted(read) == sorted([(0, i) for i in range(rows)] * 3)


def test_a_run_that_was_stopped_many_times_is_the_same_run(cache: Path, tmp_path: Path):
    config = settings(optim={"steps": 9})
    train(config, [cache], tmp_path / "straight")
    for number, stop in enumerate((1, 2, 5, 8, None)):
        train(config, [cache], tmp_path / "parts", number > 0, stop)
    assert_same(tmp_path / "straight", tmp_path / "parts")


def test_moments_and_rate_go_on_where_they_were(cache: Path, tmp_path: Path):
    """Warm-up 4 of 10 steps, cosine: the rate of step 6 is known, and the moments are not cold."""
    config = settings(optim={"steps": 10, "lr": 1.0e-3, "warmup_ratio": 0.4})
    train(config, [cache], tmp_path / "run", stop_after=5)
    train(config, [cache], tmp_path / "run", True, 6)
    assert lines(tmp_path / "run", "metrics.jsonl")[5]["lr"] == pytest.approx(1e-3 * 0.9330127018922193)  # (1 + cos(pi / 6)) / 2
    folder = checkpoint.newest(tmp_path / "run")
    moments = checkpoint.load_tensors(folder, checkpoint.load_state(folder), checkpoint.OPTIMIZER)
    assert {float(tensor) for name, tensor in moments.items() if name.startswith("step.")} == {6.0}
