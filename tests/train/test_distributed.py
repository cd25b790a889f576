"""Several processes train as one: the same samples, losses and weights, whatever their number; and none waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import settings, together, train, write

from dflash_cache.common.errors import InputError
from dflash_cache.train import checkpoint
from dflash_cache.train.config import DistributedConfig
from dflash_cache.train.dist import device_name, join
from dflash_cache.train.export import export, load_drafter
from dflash_cache.train.launch import Launch, read_launch

LENGTHS = [40, 61, 12, 33, 50, 9, 44, 38, 27, 56, 20, 63, 31]


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def weights(run: Path, name: str = checkpoint.MODEL) -> dict[str, torch.Tensor]:
    folder = checkpoint.newest(run)
    return checkpoint.load_tensors(folder, checkpoint.load_state(folder), name)


def assert_same_run(one: Path, other: Path, tolerance: float = 1e-6) -> None:
    """Samples exactly; losses and weights to `tolerance`."""
    assert (one / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    assert [line["lr"] for line in lines(one)] == [line["lr"] for line in lines(other)]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines(one)] == pytest.approx([line[name] for line in lines(other)], rel=tolerance)
    assert [line["accuracy_per_slot"] for line in lines(one)] == [line["accuracy_per_slot"] for line in lines(other)]
    assert [line["tokens"] for line in lines(one)] == [line["tokens"] for line in lines(other)]
    ours, theirs = weights(one), weights(other)
    for weight in ours:
        torch.testing.assert_close(ours[weight], theirs[weight], rtol=0, atol=10 * tolerance)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cache") / "cache", LENGTHS)


@pytest.mark.parametrize(("size", "mode", "step"), [
    (2, "ddp", {"accumulate_rows": 2}),
    (3, "ddp", {"accumulate_rows": 4}),
    (2, "ddp", {"accumulate_rows": None, "accumulate_tokens": 130}),
    (2, "fsdp2", {"accumulate_rows": 3}),
    (2, "fsdp2", {"accumulate_rows": 2, "name": "muon"}),
])  # fmt: skip
def test_a_run_does_not_depend_on_the_number_of_processes(cache: Path, tmp_path: Path, size: int, mode: str, step: dict[str, Any]):
    """One process that takes all rows of a step, against several that share them; with more rows than a process has, and fewer."""
    config = settings(optim=step, distributed={"mode": mode})
    train(settings(optim=step), [cache], tmp_path / "one")
    summaries = together(size, train, config, [cache], tmp_path / "several")
    assert len({(s["steps"], s["tokens"], s["loss"]) for s in summaries}) == 1
    assert_same_run(tmp_path / "one", tmp_path / "several", 1e-6 if "name" not in step else 1e-3)  # muon multiplies in bfloat16


@pytest.mark.parametrize(("size", "mode"), [(2, "ddp"), (2, "fsdp2")])
def test_a_resumed_run_of_several_processes_is_bit_identical(cache: Path, tmp_path: Path, size: int, mode: str):
    """20 steps; or 7, and 13 more from the checkpoint, which stands inside an epoch. Weights, moments, mean, rates, samples."""
    config = settings(optim={"steps": 20, "ema_decay": 0.9}, distributed={"mode": mode})
    together(size, train, config, [cache], tmp_path / "straight")
    together(size, train, config, [cache], tmp_path / "parts", stop_after=7)
    assert checkpoint.load_state(checkpoint.newest(tmp_path / "parts")).row > 0
    together(size, train, config, [cache], tmp_path / "parts", True)
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.EMA):
        ours, theirs = weights(tmp_path / "straight", name), weights(tmp_path / "parts", name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert {tensor.dtype for tensor in theirs.values()} == {torch.float32}
    assert float(weights(tmp_path / "parts", checkpoint.OPTIMIZER)["exp_avg.fc.weight"].abs().max()) > 0
    assert (tmp_path / "straight/samples.jsonl").read_text() == (tmp_path / "parts/samples.jsonl").read_text()
    for name in ("loss", "lr", "grad_norm"):
        assert [line[name] for line in lines(tmp_path / "straight")] == [line[name] for line in lines(tmp_path / "parts")]


@pytest.mark.parametrize(("first", "second"), [((1, "ddp"), (3, "ddp")), ((2, "fsdp2"), (1, "ddp")), ((2, "ddp"), (2, "fsdp2"))])
def test_a_run_goes_on_with_another_number_or_kind_of_processes(cache: Path, tmp_path: Path, first: tuple[int, str], second: tuple[int, str]):
    """The rows of a step and the lanes are those of the first start, even where it left them to the number of processes."""
    chosen = first[0] == 2
    train(settings(data={"lanes": 2 if chosen else 1}), [cache], tmp_path / "one")
    given = {"accumulate_rows": None if chosen else 2}
    for (size, mode), resume in ((first, False), (second, True)):
        config = settings(optim=given, distributed={"mode": mode})
        arguments = (config, [cache], tmp_path / "run", resume, None if resume else 3)
        together(size, train, *arguments) if size > 1 else train(*arguments)
    assert_same_run(tmp_path / "one", tmp_path / "run")
    assert [life["processes"] for life in json.loads((tmp_path / "run/run.json").read_text())["lives"]] == [first[0], second[0]]
    load_drafter(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "drafter")


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_process_without_any_anchor_neither_stops_the_others_nor_changes_the_update(tmp_path: Path, mode: str):
    """Every row holds one sample; of two rows a step one or both teach nothing, and an epoch has an odd number of rows."""
    cache = write(tmp_path / "cache", [60, 58, 61, 59, 57], unsupervised=[1, 2, 3])
    config = settings(optim={"steps": None, "epochs": 3.0, "accumulate_rows": 2})
    alone = train(config, [cache], tmp_path / "one")
    found = together(2, train, {**config, "distributed": {"mode": mode, "timeout_seconds": 20}}, [cache], tmp_path / "two")
    assert [(s["steps"], s["skipped_steps"]) for s in found] == [(8, alone["skipped_steps"])] * 2
    assert alone["skipped_steps"] > 0
    assert (tmp_path / "one/samples.jsonl").read_text() == (tmp_path / "two/samples.jsonl").read_text()
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6) for name in ours)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_what_is_not_finite_in_one_process_changes_no_weight_in_any(tmp_path: Path, mode: str):
    """One sample of four is broken; a step reads two. Steps with it are skipped by both processes, and only those."""
    cache = write(tmp_path / "cache", [60, 58, 61, 59], poisoned=[2])
    config = settings(optim={"steps": 6}, distributed={"mode": mode})
    found = together(2, train, config, [cache], tmp_path / "run")
    assert [s["skipped_steps"] for s in found] == [3, 3]
    skipped = {line["step"] for line in lines(tmp_path / "run") if line["loss"] is None}
    assert skipped == {line["step"] for line in lines(tmp_path / "run", "samples.jsonl") if [0, 2] in line["samples"]}
    assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path / "run").values())


def test_too_many_steps_that_are_not_finite_stop_all_processes_and_name_the_samples_of_all(tmp_path: Path):
    cache = write(tmp_path / "cache", [60, 58], poisoned=[0, 1])
    config = settings(run={"max_nonfinite_steps": 2})
    with pytest.raises(RuntimeError, match=r"2 steps in a row.*") as caught:
        together(2, train, config, [cache], tmp_path / "run")
    assert "cache 0 sample 0" in str(caught.value)
    assert "cache 0 sample 1" in str(caught.value)


def test_torchrun_starts_a_run_that_prints_one_document(cache: Path, tmp_path: Path):
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "dflash_cache", "train"]
    fields = ["data.row_tokens=64", "model.block_size=4", "model.num_layers=1", "model.mask_token_id=0", "optim.steps=2", "run.device=cpu"]
    sets = [word for field in (*fields, "run.trackers=[]") for word in ("--set", field)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    flags = ["--cache", str(cache), "--out", str(tmp_path / "run"), *sets, "--json"]
    done = subprocess.run([*words, *flags], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["steps"] == 2
    assert "2 processes (ddp)" in done.stderr
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["lives"][0]["processes"], record["config"]["optim"]["accumulate_rows"]) == (2, 2)


def test_several_processes_of_mode_none_are_refused_before_they_meet():
    with (
        pytest.raises(InputError, match="several processes would write one run"),
        join(Launch(0, 2), DistributedConfig(mode="none"), torch.device("cpu")),
    ):
        pass


def test_one_process_is_never_a_group():
    for mode in ("auto", "none", "ddp", "fsdp2"):
        with join(Launch(), DistributedConfig(mode=mode), torch.device("cpu")) as processes:
            assert (processes.rank, processes.size, processes.mode) == (0, 1, "none")


def test_the_place_of_a_process_is_what_torchrun_says():
    assert read_launch({}) == Launch(0, 1, 0)
    assert read_launch({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == Launch(3, 4, 1)
    for wrong in ({"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x"}):
        with pytest.raises(InputError, match="makes no sense"):
            read_launch(wrong)


def test_each_process_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_name(Launch(5, 8, 1), "auto") == "cuda:1"
    assert device_name(Launch(5, 8, 1), "cpu") == "cpu"
    assert device_name(Launch(), "cuda:3") == "cuda:3"
    with pytest.raises(InputError, match="cannot share one GPU"):
        device_name(Launch(1, 2, 1), "cuda:0")
