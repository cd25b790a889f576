"""The loop: exact resume, steps that change nothing, what is logged, and when checkpoints come."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import CPU32, Document, TinyHead, make_batch, tiny_drafter

from dflash_cache.common.errors import RunFailed
from dflash_cache.train import checkpoint
from dflash_cache.train.batch import Batch
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.schedule import lr_at
from dflash_cache.train.trainer import Trainer
from dflash_cache.train.work import work


class FakeRows:
    """Epochs of `per_epoch` rows of two documents each; the order differs from epoch to epoch. Notes which rows were read."""

    def __init__(self, per_epoch: int = 5, change: Any = None) -> None:
        self.per_epoch, self.change, self.read = per_epoch, change, []

    def rows_per_epoch(self, epoch: int) -> int:
        return self.per_epoch

    def tokens_per_row(self, epoch: int) -> list[int]:
        return [23] * self.per_epoch

    def epoch(self, epoch: int, start_row: int = 0, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        order = torch.randperm(self.per_epoch, generator=torch.Generator().manual_seed(epoch)).tolist()
        for number in order[start_row:] if rows is None else [order[row] for row in rows]:
            self.read.append((epoch, number))
            batch = make_batch([Document(14, seed=2 * number), Document(9, seed=2 * number + 1)], 24, first_sample=2 * number)
            yield self.change(epoch, number, batch) if self.change else batch


def configured(**sections: dict[str, Any]) -> TrainConfig:
    base: dict[str, dict[str, Any]] = {
        "optim": {"steps": 12, "lr": 1e-2, "warmup_ratio": 0.3},
        "run": {"trackers": (), "log_every": 1, "checkpoint_every": 100},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return TrainConfig.model_validate(base)


def trainer(config: TrainConfig, run: Path, rows: FakeRows | None = None) -> Trainer:
    return Trainer(config, rows or FakeRows(), tiny_drafter(spread=0.1), TinyHead(), CPU32, run)  # type: ignore[arg-type]


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stops", [[5], [5, 6, 11]])
def test_a_resumed_run_is_bit_identical(tmp_path: Path, stops: list[int]):
    """12 steps straight, or stopped and resumed: weights, moments, rates, the order of rows, and the log."""
    config = configured(loss={"anchors_per_row": 6, "feature_noise": 0.05}, optim={"accumulate_rows": 2})
    straight = FakeRows()
    trainer(config, tmp_path / "straight", in_folder(tmp_path / "straight", straight)).train()
    order = []
    for number, stop in enumerate([*stops, None]):
        rows = FakeRows()
        torch.manual_seed(number)  # global randomness plays no part
        part = trainer(config, tmp_path / "parts", in_folder(tmp_path / "parts", rows))
        if number:
            part.resume(checkpoint.newest(tmp_path / "parts"))
        part.train(stop_after=stop)
        order += rows.read[: 2 * (part.step - (stops[number - 1] if number else 0))]
    assert order == straight.read[:24]
    ends = [checkpoint.newest(tmp_path / name) for name in ("straight", "parts")]
    assert ends[0].name == ends[1].name == "step-00000012"
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes()
    moments = checkpoint.load_tensors(ends[1], checkpoint.load_state(ends[1]), checkpoint.OPTIMIZER)
    assert float(moments["exp_avg.fc.weight"].abs().max()) > 0
    logs = [[without_times(line) for line in lines(tmp_path / name)] for name in ("straight", "parts")]
    assert logs[0] == logs[1]
    assert [line["lr"] for line in logs[1]] == [lr_at(step, 12, config.optim) for step in range(12)]


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.endswith(("seconds", "second"))}


def in_folder(run: Path, rows: FakeRows) -> FakeRows:
    run.mkdir(exist_ok=True)
    return rows


def test_a_log_that_ran_ahead_of_the_checkpoint_is_cut_on_resume(tmp_path: Path):
    part = trainer(configured(), tmp_path)
    part.train(stop_after=4)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 1}\n{"step": 6, "lo')
    again = trainer(configured(), tmp_path)
    again.resume(checkpoint.newest(tmp_path))
    again.train(stop_after=6)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_resuming_at_the_end_of_an_epoch_loses_no_row(tmp_path: Path):
    """Two epochs of 5 rows; stopped after exactly one."""
    config = configured(optim={"steps": None, "epochs": 2.0})
    part = trainer(config, tmp_path)
    assert part.total_steps == 10
    part.train(stop_after=5)
    rows = FakeRows()
    again = trainer(config, tmp_path, rows)
    again.resume(checkpoint.newest(tmp_path))
    assert again.train().steps == 10
    assert [number for epoch, number in rows.read if epoch == 1] == torch.randperm(5, generator=torch.Generator().manual_seed(1)).tolist()


def test_training_lowers_the_loss(tmp_path: Path):
    summary = trainer(configured(optim={"steps": 60}), tmp_path).train()
    logged = lines(tmp_path)
    assert summary.loss < 0.6 * logged[0]["loss"]
    assert summary.tokens == 60 * 23
    assert logged[-1]["tau"] == pytest.approx(logged[-1]["streak"] + 1)


def poisoned(batch: Batch) -> Batch:
    features = batch.features.clone()
    features[2] = float("nan")
    return replace(batch, features=features)


def test_a_step_that_is_not_finite_changes_no_weight_and_is_counted(tmp_path: Path):
    rows = FakeRows(5, lambda epoch, number, batch: poisoned(batch) if (epoch, number) == bad else batch)
    bad = (0, torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist()[1])
    part = trainer(configured(optim={"steps": 3}), tmp_path, rows)
    part.train(stop_after=1)
    before = {name: p.detach().clone() for name, p in part.drafter.named_parameters()}
    moments = part.optimizer.state[part.parameters[0]]["exp_avg"].clone()
    window, _ = part._one_step(next(work(rows, part.position, part.config.optim)), 0.01)
    assert (window.skipped, part.state.skipped_steps) == (1, 1)
    assert all(torch.equal(p, before[name]) for name, p in part.drafter.named_parameters())
    assert torch.equal(part.optimizer.state[part.parameters[0]]["exp_avg"], moments)
    assert all(p.grad is None for p in part.parameters)


def test_too_many_steps_that_are_not_finite_stop_the_run_and_name_the_samples(tmp_path: Path):
    rows = FakeRows(5, lambda epoch, number, batch: poisoned(batch))
    with pytest.raises(RunFailed, match=r"3 steps in a row.*") as caught:
        trainer(configured(run={"max_nonfinite_steps": 3}), tmp_path, rows).train()
    first = torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist()[0]
    assert f"step 1: cache 0 sample {2 * first}, cache 0 sample {2 * first + 1}" in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_step_without_any_anchor_is_skipped_and_counted_and_no_reason_to_stop(tmp_path: Path):
    def unsupervised(epoch: int, number: int, batch: Batch) -> Batch:
        nothing = torch.zeros_like(batch.loss_mask_T)
        return replace(batch, loss_mask_T=nothing, next_supervised_T=nothing) if number != 2 else batch

    summary = trainer(configured(optim={"steps": 10}, run={"max_nonfinite_steps": 2}), tmp_path, FakeRows(5, unsupervised)).train()
    assert (summary.steps, summary.skipped_steps) == (10, 8)
    assert math.isfinite(summary.loss)
    assert [line["loss"] is None for line in lines(tmp_path)].count(False) == 2
    assert sum(line["skipped_steps"] for line in lines(tmp_path)) == 8


def test_checkpoints_come_every_so_many_optimizer_steps_and_at_the_end(tmp_path: Path):
    config = configured(optim={"steps": 5, "accumulate_rows": 4}, run={"checkpoint_every": 2, "keep": 10})
    trainer(config, tmp_path).train()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000002", "step-00000004", "step-00000005"]


def test_the_logged_loss_is_the_mean_over_the_window_whatever_is_accumulated(tmp_path: Path):
    """A drafter whose logits are all zero costs log 32 a slot; it is logged as that, not times 4 or 2."""
    config = configured(optim={"steps": 4, "accumulate_rows": 4, "lr": 1e-30}, run={"log_every": 2})
    part = trainer(config, tmp_path)
    part.drafter.norm.weight.data.zero_()
    part.train()
    assert [line["loss"] for line in lines(tmp_path)] == [pytest.approx(math.log(32), rel=1e-6)] * 2


def test_tensorboard_events_are_written_when_asked_for(tmp_path: Path):
    trainer(configured(optim={"steps": 2}, run={"trackers": ["tensorboard"]}), tmp_path).train()
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_updates_too_small_for_the_type_of_the_products_are_not_lost(tmp_path: Path):
    """Around 1 a bfloat16 moves in steps of 1/128; 40 updates of at most 1e-4 each must still add up in the float32 weights."""
    config = configured(optim={"steps": 40, "lr": 1e-4, "warmup_ratio": 0.0, "schedule": "constant"})
    compute = replace(CPU32, dtype=torch.bfloat16)
    part = Trainer(config, FakeRows(), tiny_drafter(spread=0.0), TinyHead(dtype=torch.bfloat16), compute, tmp_path)  # type: ignore[arg-type]
    before = part.drafter.norm.weight.detach().clone()
    assert torch.equal(before, torch.ones(8))
    part.train()
    moved = (part.drafter.norm.weight.detach() - before).abs()
    assert part.drafter.norm.weight.dtype == torch.float32
    assert 1e-4 < float(moved.max()) < 40.5e-4
    assert torch.equal(part.drafter.norm.weight.detach().bfloat16()[moved < 1 / 512], before.bfloat16()[moved < 1 / 512])


@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], [[3], [2, 1], [0]]])
def test_an_update_does_not_depend_on_how_documents_are_split_into_rows(tmp_path: Path, split: list[list[int]]):
    """Documents of 1, 1, 4 and 4 anchors: means of means would weigh them by their company."""
    documents = [Document(n, seed=n * 10 + i, supervised=[0] * 2 + [1] * (n - 2)) for i, n in enumerate((4, 4, 7, 7))]

    class Split(FakeRows):
        def epoch(self, epoch: int, start_row: int = 0, rows: Sequence[int] | None = None) -> Iterator[Batch]:
            for row in split[start_row:]:
                batch = make_batch([documents[number] for number in row], 32)
                yield replace(batch, sample_ids=tuple((0, number) for number in row))

    def weights(rows: FakeRows, run: Path) -> tuple[list[torch.Tensor], float]:
        run.mkdir()
        part = trainer(configured(optim={"steps": 1, "accumulate_rows": rows.per_epoch, "lr": 1e-3}), run, rows)
        part.train()
        return [parameter.detach() for parameter in part.parameters], lines(run)[0]["loss"]

    ours, loss = weights(Split(len(split)), tmp_path / "split")
    split = [[0, 1, 2, 3]]
    whole, expected = weights(Split(1), tmp_path / "whole")
    assert loss == pytest.approx(expected, rel=1e-6)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(ours, whole))


def test_a_line_of_the_log_weighs_its_steps_by_what_they_hold(tmp_path: Path):
    """Two steps of one line: a row of 12 blocks, and the same with all but 3 of them unsupervised."""

    def thinned(epoch: int, number: int, batch: Batch) -> Batch:
        if number % 2:
            return batch
        keep = torch.arange(24) < 5
        return replace(batch, loss_mask_T=batch.loss_mask_T & keep, next_supervised_T=batch.next_supervised_T & (torch.arange(24) < 4))

    for every, name in ((1, "each"), (2, "both")):
        (tmp_path / name).mkdir()
        trainer(configured(optim={"steps": 2, "lr": 1e-30}, run={"log_every": every}), tmp_path / name, FakeRows(2, thinned)).train()
    each, (both,) = lines(tmp_path / "each"), lines(tmp_path / "both")
    assert len({line["blocks"] for line in each}) == 2
    assert both["blocks"] == sum(line["blocks"] for line in each)
    assert both["streak"] == pytest.approx(sum(line["streak"] * line["blocks"] for line in each) / both["blocks"])
    assert min(line["loss"] for line in each) < both["loss"] < max(line["loss"] for line in each)
    assert both["loss"] != pytest.approx(sum(line["loss"] for line in each) / 2)
