"""run.json: what a run was made of and by, every start of it, and what a resumed run says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import settings, train, write

from dflash_cache.common.errors import InputError
from dflash_cache.train import record
from dflash_cache.train.record import git_state


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("record") / "cache", [40, 61, 12])


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_git_state_is_the_commit_and_whether_there_are_changes(tmp_path: Path):
    assert git_state(tmp_path / "nowhere") is None
    git(tmp_path, "init")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "x")
    state = git_state(tmp_path)
    assert (len(state["commit"]), state["dirty"]) == (40, False)
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {**state, "dirty": True}


def test_without_git_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_each_start_is_written_down_and_a_difference_is_said(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dflash", "train", "--cache", "x"])
    train(settings(run={"checkpoint_every": 2}), [cache], tmp_path / "run", stop_after=4)
    first = json.loads((tmp_path / "run/run.json").read_text())
    (start,) = first["lives"]
    assert start["command"] == ["dflash", "train", "--cache", "x"]
    assert {"torch", "python", "dflash-cache"} <= start["versions"].keys()
    assert (start["compute"], start["processes"], start["from_step"]) == ("cpu, float32, dense attention", 1, 0)
    assert first["config"]["optim"]["lr"] == 3e-3
    assert first["total_steps"] == 6
    capsys.readouterr()

    train(settings(), [cache], tmp_path / "run", True, stop_after=5)
    assert "note" not in capsys.readouterr().err
    changed = {**first, "lives": [{**start, "compute": "cuda:0, bfloat16, flex attention", "versions": {**start["versions"], "torch": "2.0"}}]}
    (tmp_path / "run/run.json").write_text(json.dumps(changed))
    train(settings(), [cache], tmp_path / "run", True)
    said = capsys.readouterr().err
    assert "the run computed on cuda:0, bfloat16, flex attention, and now cpu, float32, dense attention" in said
    assert f"the run used torch 2.0, and now {start['versions']['torch']}" in said
    assert [life["from_step"] for life in json.loads((tmp_path / "run/run.json").read_text())["lives"]] == [0, 5]


def test_what_changes_nothing_that_is_learned_may_change(cache: Path, tmp_path: Path):
    train(settings(), [cache], tmp_path / "run", stop_after=2)
    free = {"keep": 1, "checkpoint_every": 1, "activation_checkpointing": True, "teacher_cache_bytes": 0, "log_samples": False}
    train(settings(run=free, distributed={"mode": "fsdp2"}), [cache], tmp_path / "run", True)
    for section, field, value in (("optim", "ema_decay", 0.9), ("run", "seed", 1), ("optim", "accumulate_rows", 3), ("data", "weights", (2.0,))):
        with pytest.raises(InputError, match=rf"{section}\.{field}: the run has"):
            train(settings(**{section: {field: value}}), [cache], tmp_path / "run", True)
    assert all(field in settings_fields(section) for section, fields in record.MAY_CHANGE.items() for field in fields)


def settings_fields(section: str) -> set[str]:
    from dflash_cache.train.config import TrainConfig

    return set(type(getattr(TrainConfig(), section)).model_fields)


def test_other_held_out_data_is_refused_by_name(cache: Path, tmp_path: Path):
    held, other = write(tmp_path / "held", [30], seed=3), write(tmp_path / "other", [30, 20], seed=4)
    train(settings(), [cache], tmp_path / "run", stop_after=2, eval_caches=[held])
    assert json.loads((tmp_path / "run/run.json").read_text())["eval_caches"][0]["samples"] == 1
    with pytest.raises(InputError, match=r"other held-out data:\n.*cache 0\.parts"):
        train(settings(), [cache], tmp_path / "run", True, eval_caches=[other])
