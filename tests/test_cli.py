"""The command line: frozen verbs and flags, help with an example, light imports, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dflash_cache.cli import main

ROOT = Path(__file__).parents[1]
FLAGS = {
    "extract": {
        "--model", "--layers", "--verifier-layer", "--data", "--cache", "--max-length", "--limit", "--engine", "--generate", "--max-new-tokens",
        "--temperature", "--mantissa-bits", "--estimate", "--seed", "--trust-remote-code", "--engine-arg", "--json",
    },
    "inspect": {"--json"},
    "verify": {"--json"},
    "targets": {"--device", "--dtype", "--json"},
    "train": {"--cache", "--out", "--config", "--set", "--dry-run", "--resume"},
    "eval": {"--cache", "--drafter", "--engine", "--model", "--data", "--json"},
    "export": {"--to", "--format"},
    "doctor": {"--cache", "--drafter", "--run", "--engine", "--model", "--limit", "--json"},
}  # fmt: skip


def run(*arguments: str) -> click.testing.Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_the_verbs_are_the_known_ones():
    assert set(main.commands) == set(FLAGS)


@pytest.mark.parametrize("verb", FLAGS)
def test_every_verb_has_its_fixed_flags_a_debug_flag_and_an_example(verb):
    command = main.commands[verb]
    names = {name for parameter in command.params for name in parameter.opts}
    assert FLAGS[verb] | {"--debug"} <= names
    assert f"dflash {verb} " in command.help
    assert all(parameter.help for parameter in command.params if isinstance(parameter, click.Option))
    assert run(verb, "--help").exit_code == 0


@pytest.mark.parametrize("verb", FLAGS)
def test_every_verb_is_in_the_readme(verb):
    assert f"dflash {verb}" in (ROOT / "README.md").read_text()


def test_help_imports_neither_torch_nor_vllm():
    code = "import sys; from dflash_cache.cli import main; main(['--help'], standalone_mode=False); assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_user_error_is_a_few_lines_with_the_fix_and_exit_code_2(tmp_path):
    result = run("inspect", str(tmp_path / "nothing"))
    assert result.exit_code == 2
    assert "is no feature cache" in result.stderr
    assert "fix:" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_debug_shows_the_traceback(tmp_path):
    assert run("inspect", str(tmp_path / "nothing"), "--debug").exit_code == 2


def test_an_unknown_flag_is_exit_code_2():
    assert run("inspect", "--nonsense").exit_code == 2


def test_inspect_and_verify_answer_in_json_alone_on_stdout(write_cache):
    cache, _, samples = write_cache()
    inspected = run("inspect", str(cache), "--json")
    assert inspected.exit_code == 0
    assert json.loads(inspected.stdout)["tokens"] == sum(len(s) for s in samples)


def test_inspect_prints_for_people(write_cache):
    cache, _, _ = write_cache()
    text = run("inspect", str(cache)).stdout
    assert "6 samples, 110 tokens" in text
    assert "layers       1, 2, 4; verifier state: raw output of block 5" in text


@pytest.mark.parametrize("bits", ["7", "3"])
def test_every_choice_of_mantissa_bits_reaches_the_configuration(tmp_path, bits):
    """The model is looked for only once the flags are accepted."""
    (tmp_path / "d.jsonl").write_text("{}\n")
    result = run(
        "extract", "--model", str(tmp_path / "no"), "--data", str(tmp_path / "d.jsonl"), "--cache", str(tmp_path / "c"), "--mantissa-bits", bits
    )
    assert result.exit_code == 2
    assert "no such folder" in result.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--temperature", "1"), "--temperature: has no effect without --generate"),
        (("--engine-arg", "a=[1,"), "the value is no YAML"),
        (("--engine-arg", "a"), "is no assignment"),
        (("--limit", "0"), "--limit"),
        (("--rank", "1"), "--rank: needs --world-size as well"),
        (("--world-size", "2"), "--world-size: needs --rank as well"),
        (("--rank", "2", "--world-size", "2"), "ranks count from 0 to world_size - 1"),
        (("--workers", "0"), "--workers"),
        (("--layers", "1,x"), "is no list of layers"),
    ],
)
def test_wrong_flags_are_refused_with_their_name(tmp_path, words, text):
    result = run("extract", "--model", "m/m", "--data", "d.jsonl", "--cache", str(tmp_path / "c"), *words)
    assert result.exit_code == 2
    assert text in result.stderr


def test_eval_refuses_flags_of_the_other_kind(tmp_path):
    result = run("eval", "--cache", str(tmp_path), "--drafter", str(tmp_path), "--data", "x.jsonl")
    assert result.exit_code == 2
    assert "--data: has no effect without --engine vllm" in result.stderr
    assert "model: is missing" in run("eval", "--engine", "vllm", "--drafter", str(tmp_path)).stderr
