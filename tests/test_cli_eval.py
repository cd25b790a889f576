"""`dflash eval`: which flags belong to which kind, and that they reach the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dflash_cache.cli import main
from dflash_cache.train.config import EvalConfig


def run(*arguments: str) -> click.testing.Result:
    return CliRunner().invoke(main, ["eval", *arguments], catch_exceptions=False)


class Result:
    def to_dict(self) -> dict[str, Any]:
        return {"tau_walk": 1.5}

    def to_text(self) -> str:
        return "acceptance length"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[EvalConfig]:
    """The configurations that offline evaluations were started with."""
    started: list[EvalConfig] = []

    def evaluate(drafter: Path, caches: list[Path], config: EvalConfig, *, limit: int | None) -> Result:
        started.append(config)
        return Result()

    monkeypatch.setattr("dflash_cache.train.evaluate.evaluate", evaluate)
    return started


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    started: list[Any] = []

    def evaluate(config: Any) -> Result:
        started.append(config)
        return Result()

    monkeypatch.setattr("dflash_cache.extract.serve.evaluate_served", evaluate)
    return started


def test_offline_flags_reach_the_configuration(offline: list[EvalConfig]):
    found = run("--cache", "c", "--drafter", "d", "--temperature", "0,0.6,1.0", "--seed", "5", "--json")
    assert (found.exit_code, json.loads(found.stdout)) == (0, {"tau_walk": 1.5})
    assert offline == [EvalConfig(temperatures=(0.0, 0.6, 1.0), seed=5)]
    run("--cache", "c", "--drafter", "d")
    assert offline[1] == EvalConfig()


def test_served_flags_reach_the_configuration(served: list[Any]):
    words = "--temperature 0.7 --num-speculative-tokens 3 --no-baseline --seed 5 --concurrency 2 --template-arg enable_thinking=false"
    assert run("--engine", "vllm", "--model", "m", "--drafter", "d", "--data", "gsm8k:200", *words.split()).exit_code == 0
    config = served[0]
    assert (config.temperature, config.num_speculative_tokens, config.baseline, config.seed, config.concurrency) == (0.7, 3, False, 5, 2)
    assert (config.data, config.template_args) == (("gsm8k:200",), {"enable_thinking": False})
    run("--engine", "vllm", "--model", "m", "--drafter", "d", "--data", "x.jsonl")
    assert (served[1].temperature, served[1].baseline) == (0.0, True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--cache c --no-baseline", "--no-baseline: has no effect without --engine vllm"),
        ("--cache c --concurrency 2", "--concurrency: has no effect without --engine vllm"),
        ("--cache c --temperature hot", "is no list of numbers"),
        ("--cache c --temperature -1", "temperatures"),
        ("--engine vllm --model m --data d --temperature 0,1", "serving is at one temperature"),
        ("--engine vllm --model m --data d --plot a.png", "--plot: has no effect with --engine"),
        ("--engine vllm --model m --data d --num-speculative-tokens 0", "num_speculative_tokens"),
        ("--engine vllm --model m --data d --cache c", "give either --cache (offline) or --engine vllm"),
    ],
)
def test_wrong_flags_are_refused_with_their_name(words: str, text: str):
    found = run("--drafter", "d", *words.split())
    assert found.exit_code == 2
    assert text in found.stderr


def test_the_help_has_examples_of_both_kinds():
    text = run("--help").stdout
    assert "dflash eval --cache held-out --drafter runs/base --temperature 0,0.6,1.0" in text
    assert "dflash eval --engine vllm --model ./target --drafter ./drafter --data gsm8k:200 --data humaneval" in text
