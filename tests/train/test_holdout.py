"""Evaluation during training: its numbers, that it disturbs nothing, the best checkpoint, the early stop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import settings, together, train, write
from rows import CPU32, TinyHead, tiny_drafter
from test_trainer import FakeRows, configured

from dflash_cache.train import checkpoint
from dflash_cache.train.config import EvalConfig, HeldOutConfig
from dflash_cache.train.dist import Processes
from dflash_cache.train.evaluate import evaluate
from dflash_cache.train.export import load_drafter
from dflash_cache.train.holdout import HeldOut
from dflash_cache.train.trainer import Trainer

LENGTHS = [40, 61, 12, 33, 50, 9, 44, 38]


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(to train on, held out)."""
    folder = tmp_path_factory.mktemp("held")
    return write(folder / "train", LENGTHS), write(folder / "held", LENGTHS, seed=7)


def test_it_gives_the_numbers_of_dflash_eval_and_changes_no_bit_of_the_training(caches: tuple[Path, Path], tmp_path: Path):
    cache, held = caches
    train(settings(eval={"every": 4}), [cache], tmp_path / "with", eval_caches=[held])
    train(settings(), [cache], tmp_path / "without")
    assert [line["step"] for line in evaluations(tmp_path / "with")] == [4, 6]
    last, found = evaluations(tmp_path / "with")[-1], evaluate(tmp_path / "with", [held], EvalConfig(device="cpu", dtype="float32"))
    assert {name: last[name] for name in found.quality.to_dict()} == found.quality.to_dict()
    assert (last["tau_walk"], last["documents"]) == (found.tau_walk, 8)
    one, other = (checkpoint.newest(tmp_path / name) / checkpoint.MODEL for name in ("with", "without"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_its_numbers_do_not_depend_on_the_number_of_processes(caches: tuple[Path, Path], tmp_path: Path, mode: str):
    cache, held = caches
    config = settings(eval={"every": 3}, distributed={"mode": mode, "timeout_seconds": 20})
    train(config, [cache], tmp_path / "one", eval_caches=[held])
    together(2, train, config, [cache], tmp_path / "two", eval_caches=[held])
    for ours, theirs in zip(evaluations(tmp_path / "one"), evaluations(tmp_path / "two"), strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


def test_held_out_samples_of_the_caches_themselves_are_evaluated_and_not_trained_on(caches: tuple[Path, Path], tmp_path: Path):
    train(settings(optim={"steps": 8}, data={"row_tokens": 64, "eval_fraction": 0.4}), [caches[0]], tmp_path / "run")
    (line,) = evaluations(tmp_path / "run")
    read = {tuple(sample) for row in (tmp_path / "run/samples.jsonl").read_text().splitlines() for sample in json.loads(row)["samples"]}
    assert len(read) + line["documents"] == len(LENGTHS)
    assert line["documents"] > 0


def test_several_sources_are_told_apart():
    """Two documents of two sources in one row."""
    from dataclasses import replace

    rows = FakeRows(3, lambda epoch, number, batch: replace(batch, sources=("a.jsonl", "b.jsonl")))
    drafter = tiny_drafter()
    found = HeldOut(rows, TinyHead(), CPU32, HeldOutConfig(), Processes())(drafter.spec, drafter.state_dict())  # type: ignore[arg-type]
    assert list(found["by_source"]) == ["a.jsonl", "b.jsonl"]
    assert [part["documents"] for part in found["by_source"].values()] == [3, 3]
    assert [part["blocks"] for part in found["by_source"].values()] == [3 * (14 - 3), 3 * (9 - 3)]
    assert sum(part["blocks"] for part in found["by_source"].values()) == found["blocks"]
    mean = sum(part["blocks"] * part["streak"] for part in found["by_source"].values()) / found["blocks"]
    assert found["tau"] == pytest.approx(1 + mean)
    assert drafter.training


class Judge:
    """Evaluations with known results."""

    def __init__(self, *taus: float, finite: Sequence[bool] = ()) -> None:
        self.taus, self.finite = list(taus), list(finite) or [True] * len(taus)

    def __call__(self, spec: Any, weights: Any) -> dict[str, Any]:
        numbers = {"tau": self.taus.pop(0), "finite": self.finite.pop(0), "tau_walk": 1.0, "accuracy": 0.0, "accuracy_per_slot": [], "by_source": {}}
        return numbers


def judged(folder: Path, judge: Judge, **sections: dict[str, Any]) -> Trainer:
    folder.mkdir(exist_ok=True)
    base: dict[str, dict[str, Any]] = {"run": {"keep": 1, "checkpoint_every": 2}, "eval": {"every": 1}, "optim": {"steps": 6}}
    config = configured(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}})
    return Trainer(config, FakeRows(), tiny_drafter(spread=0.1), TinyHead(), CPU32, folder, evaluate=judge)  # type: ignore[arg-type]


def test_the_mean_of_the_weights_is_evaluated_when_there_is_one(tmp_path: Path):
    seen: list[dict[str, torch.Tensor]] = []
    judge = Judge(1.1)

    def note(spec: Any, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
        seen.append({name: tensor.clone() for name, tensor in weights.items()})
        return judge(spec, weights)

    part = judged(tmp_path, note, optim={"steps": 1, "ema_decay": 0.9})  # type: ignore[arg-type]
    part.train()
    assert part.mean is not None
    assert seen[0].keys() == part.drafter.state_dict().keys()
    assert all(torch.equal(tensor, part.mean.tensors[name]) for name, tensor in seen[0].items())
    assert not torch.equal(seen[0]["fc.weight"], part.drafter.fc.weight)


def test_the_best_checkpoint_is_kept_beside_the_newest_and_loads(tmp_path: Path):
    summary = judged(tmp_path, Judge(1.1, 1.5, 1.3, 1.5, 1.2, 1.4)).train()
    assert (summary.best_step, summary.best_tau, summary.stopped_early) == (2, 1.5, False)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000002", "step-00000006"]
    best = tmp_path / "checkpoints/best"
    assert checkpoint.load_state(best).step == 2
    load_drafter(best)
    assert checkpoint.newest(tmp_path).name == "step-00000006"
    assert "best tau 1.500 after step 2" in summary.to_text()


def test_a_better_one_between_two_checkpoints_is_saved_at_once(tmp_path: Path):
    judged(tmp_path, Judge(1.1, 1.2, 1.9, 1.1, 1.1, 1.1)).train()
    assert checkpoint.load_state(tmp_path / "checkpoints/best").step == 3


def test_weights_that_are_not_finite_are_never_the_best(tmp_path: Path):
    summary = judged(tmp_path, Judge(9.0, 1.2, 1.1, 1.1, 1.1, 1.1, finite=[False, True, True, True, True, True])).train()
    assert (summary.best_step, summary.best_tau) == (2, 1.2)
    drafter = tiny_drafter()
    weights = {**drafter.state_dict(), "norm.weight": torch.full((8,), float("nan"))}
    assert not HeldOut(FakeRows(1), TinyHead(), CPU32, HeldOutConfig(), Processes())(drafter.spec, weights)["finite"]  # type: ignore[arg-type]


def test_the_run_stops_when_evaluations_do_not_get_better(tmp_path: Path):
    summary = judged(tmp_path, Judge(1.1, 1.5, 1.4, 1.5, 9.9), eval={"patience": 2}, run={"log_every": 100}).train()
    assert (summary.steps, summary.best_step, summary.stopped_early) == (4, 2, True)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [4]  # the last steps are told
    assert checkpoint.newest(tmp_path).name == "step-00000004"
    again = judged(tmp_path, Judge(), eval={"patience": 2})
    again.resume(checkpoint.newest(tmp_path))
    assert (again.train().steps, again.train().stopped_early) == (4, True)


def test_a_resumed_run_remembers_what_was_best_and_how_long_ago(tmp_path: Path):
    part = judged(tmp_path, Judge(1.1, 1.5, 1.4), eval={"patience": 2})
    part.train(stop_after=3)
    (tmp_path / "checkpoints/best").unlink()  # as if the first life had ended before it was marked
    again = judged(tmp_path, Judge(1.3), eval={"patience": 2})
    again.resume(checkpoint.newest(tmp_path))
    summary = again.train()
    assert (summary.steps, summary.best_step, summary.stopped_early) == (4, 2, True)
    assert checkpoint.load_state(tmp_path / "checkpoints/best").step == 2
