"""Trackers: asked for by name, refused when missing, fed what metrics.jsonl holds, and never the end of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ranks import settings, train, write

from dflash_cache.common.errors import InputError
from dflash_cache.train import trackers

FAKE = """
import json, pathlib
CALLS = pathlib.Path(__file__).with_suffix(".jsonl")
def note(*call):
    with open(CALLS, "a") as file:
        file.write(json.dumps(call) + "\\n")
"""
WANDB = """
class Run:
    def log(self, values, step): note("log", step, values)
    def finish(self): note("finish")
def init(**given):
    note("init", {name: given[name] for name in ("project", "name", "id", "resume")}, given["config"]["optim"]["lr"])
    return Run()
"""
TRACKIO = """
def init(**given): note("init", {name: given[name] for name in ("project", "resume")}, given["config"]["optim"]["lr"])
def log(values, step): note("log", step, values)
def finish(): note("finish")
"""
MLFLOW = """
def set_experiment(name): note("experiment", name)
def start_run(run_name): note("start", run_name)
def log_params(values): note("params", values["optim.lr"])
def log_metrics(values, step): note("log", step, values)
def end_run(): note("finish")
"""


@pytest.fixture(autouse=True)
def _forgotten():
    """No fake outlives its test."""
    yield
    for name in ("wandb", "trackio", "mlflow"):
        sys.modules.pop(name, None)


def install(name: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `name` on the path; the file of its calls."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(FAKE + code)
    monkeypatch.syspath_prepend(str(folder))
    return folder / f"{name}.jsonl"


@pytest.mark.parametrize(("name", "code"), [("wandb", WANDB), ("trackio", TRACKIO), ("mlflow", MLFLOW)])
def test_a_tracker_gets_the_settings_every_line_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str):
    calls = install(name, code, tmp_path / "modules", monkeypatch)
    cache = write(tmp_path / "cache", [40, 61, 12, 33, 20, 30])
    config = settings(optim={"steps": 3}, run={"trackers": [name]}, data={"row_tokens": 64, "eval_fraction": 0.4}, eval={"every": 3})
    train(config, [cache], tmp_path / "run")
    found = [json.loads(line) for line in calls.read_text().splitlines()]
    logged = [(step, values) for kind, step, values in (call for call in found if call[0] == "log")]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(step, values["loss"]) for step, values in logged if "loss" in values] == [(line["step"], line["loss"]) for line in lines]
    assert logged[0][1]["accuracy_slot/03"] == lines[0]["accuracy_per_slot"][2]
    (evaluation,) = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    assert [(step, values["eval/tau"]) for step, values in logged if "eval/tau" in values] == [(3, evaluation["tau"])]
    assert config["optim"]["lr"] in [value for call in found for value in call]
    assert found[-1] == ["finish"]


def test_a_missing_package_is_refused_at_the_start_and_named(tmp_path: Path):
    cache = write(tmp_path / "cache", [40])
    with pytest.raises(InputError, match="pip install trackio mlflow"):
        train(settings(run={"trackers": ["trackio", "mlflow"]}), [cache], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_is_named_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    code = MLFLOW.replace('note("log", step, values)', 'raise OSError("no route to host")')
    calls = install("mlflow", code, tmp_path / "modules", monkeypatch)
    assert train(settings(optim={"steps": 2}, run={"trackers": ["mlflow"]}), [write(tmp_path / "cache", [40])], tmp_path / "run")["steps"] == 2
    assert capsys.readouterr().err.count("mlflow failed and gets nothing more; metrics.jsonl has everything: no route to host") == 1
    assert "log" not in calls.read_text()


def test_by_default_nothing_leaves_the_machine():
    from dflash_cache.train.config import TrainConfig

    assert TrainConfig().run.trackers == ("tensorboard",)


def test_names_are_those_that_every_tracker_takes(tmp_path: Path):
    taken: list = []

    class Fake:
        def log(self, step, values):
            taken.append(values)

        def close(self):
            taken.append("closed")

    of = trackers.Trackers((), tmp_path, {}, 0)
    of._open["fake"] = Fake()
    of.log(1, {"eval/tau/data:train.jsonl#1": 2.0})
    of.close()
    assert taken == [{"eval/tau/data_train.jsonl_1": 2.0}, "closed"]
