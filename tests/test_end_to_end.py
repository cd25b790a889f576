"""From chats to a served drafter, through the command line, with a real vLLM on the CPU and a tiny random target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_target as tiny

TRAIN = {
    "data.row_tokens": 256,
    "model.block_size": 4,
    "model.num_layers": 2,
    "loss.anchors_per_row": 128,
    "optim.lr": 5e-3,
    "optim.steps": 500,
    "run.trackers": [],
    "run.dtype": "float32",
}
LONELY = """
import builtins, socket, sys
real = builtins.__import__
def guarded(name, *rest, **more):
    if name.split(".")[0] in {"vllm", "datasets"}:
        raise ImportError(f"{name} must not be needed for training")
    return real(name, *rest, **more)
def offline(*_, **__):
    raise OSError("training must not open a connection")
socket.socket.connect = socket.create_connection = offline
builtins.__import__ = guarded
from dflash_cache.cli import main
main(sys.argv[1:])
"""
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
from dflash_cache.extract.vllm_setup import cpu_arguments, quiet_environment

def main(folder, prompts):
    with quiet_environment():
        sizes = {"max_model_len": 256, "max_num_seqs": 8, "enable_prefix_caching": False, "skip_tokenizer_init": True, "dtype": "bfloat16"}
        llm = LLM(model=folder, disable_log_stats=False, **{**sizes, **cpu_arguments()})
        sampling = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=[2], detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value") and "spec_decode" in metric.name}
        llm.llm_engine.engine_core.shutdown()
    print("counted", json.dumps(counted))

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
"""


def dflash(*words: object, lonely: bool = False) -> dict[str, Any]:
    """One verb with --json in a process of its own; `lonely` without vllm, datasets and network."""
    start = ["-c", LONELY] if lonely else ["-m", "dflash_cache"]
    done = subprocess.run([sys.executable, *start, *map(str, words), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything once: each answer of each verb, and where things lie."""
    folder = tmp_path_factory.mktemp("chain")
    target = tiny.build_target(folder / "target")
    prompts = [tiny.chat(f"{word} {number}") for number in range(6) for word in ("alpha", "beta", "gamma", "delta")]
    data = tiny.write_jsonl(folder / "prompts.jsonl", prompts)
    at: dict[str, Any] = {
        "folder": folder,
        "target": target,
        "data": data,
        "cache": folder / "cache",
        "run": folder / "run",
        "drafter": folder / "drafter",
    }
    at["extracted"] = dflash(
        "extract", "--model", target, "--data", data, "--generate", "--max-new-tokens", 40, "--max-length", 256, "--cache", at["cache"]
    )
    at["verified"] = dflash("verify", at["cache"])
    sets = [word for name, value in TRAIN.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    at["trained"] = dflash("train", "--cache", at["cache"], "--out", at["run"], *sets, lonely=True)
    at["offline"] = dflash("eval", "--cache", at["cache"], "--drafter", at["run"], lonely=True)
    at["exported"] = dflash("export", at["run"], "--to", at["drafter"], lonely=True)
    at["offline_export"] = dflash("eval", "--cache", at["cache"], "--drafter", at["drafter"], lonely=True)
    served = ["--engine", "vllm", "--model", target, "--data", data, "--max-new-tokens", 40]
    at["served"] = dflash("eval", "--drafter", at["drafter"], *served)
    return at


@pytest.mark.vllm
def test_every_prompt_becomes_a_sample_and_the_cache_is_proven(chain):
    assert chain["extracted"]["samples"] == 24
    assert chain["verified"]["ok"] is True
    assert chain["verified"]["fidelity"] == 1.0
    assert chain["verified"]["teacher_equals_data"] / chain["verified"]["teacher_tokens"] > 0.97  # greedy: near ties aside


@pytest.mark.vllm
def test_training_needs_the_cache_alone_and_learns(chain):
    losses = [json.loads(line)["loss"] for line in (chain["run"] / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] > 5
    assert losses[-1] < 1
    assert chain["trained"]["steps"] == 500


@pytest.mark.vllm
def test_the_export_is_the_checkpoint(chain):
    """bfloat16 rounding may change a few drafts."""
    assert chain["offline_export"]["tau_walk"] == pytest.approx(chain["offline"]["tau_walk"], rel=0.05)


@pytest.mark.vllm
def test_what_is_measured_offline_is_what_is_served(chain):
    """The prompts are those of training, so the drafter is nearly perfect and any fault of convention would show."""
    served = chain["served"]
    assert served["tau"] > 2.5
    assert served["tau"] == pytest.approx(chain["offline_export"]["tau_walk"], rel=0.1)
    assert served["drafts"] > 0
    assert served["tau"] == pytest.approx(1 + sum(served["accepted_per_position"]) / served["drafts"], abs=1e-9)


@pytest.mark.vllm
def test_a_drafter_never_changes_the_answer(chain):
    """At temperature 0 only near ties may differ, since batches round differently."""
    assert chain["served"]["differing_outputs"] <= 2


@pytest.mark.vllm
def test_a_speculators_folder_alone_tells_vllm_everything_and_drafts_as_well(chain):
    """`vllm serve FOLDER`: target, method, number of drafts and weights all come from the folder."""
    folder = chain["folder"] / "speculators"
    dflash("export", chain["run"], "--to", folder, "--format", "speculators", "--model", chain["target"], lonely=True)
    tokenizer = tiny.build_tokenizer()
    rows = [json.loads(line)["messages"][:1] for line in chain["data"].read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(row, add_generation_prompt=True, tokenize=True, return_dict=False) for row in rows]
    script = chain["folder"] / "serve.py"  # a file, since vLLM starts its engine in a process that imports it again
    script.write_text(SERVE)
    done = subprocess.run([sys.executable, str(script), str(folder), json.dumps(prompts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    counted = json.loads(done.stdout.rpartition("counted ")[2])
    drafts, accepted = counted["vllm:spec_decode_num_drafts"], counted["vllm:spec_decode_num_accepted_tokens"]
    assert counted["vllm:spec_decode_num_draft_tokens"] == 3 * drafts
    assert 1 + accepted / drafts == pytest.approx(chain["served"]["tau"], rel=0.1)


@pytest.mark.vllm
def test_another_drafter_of_fewer_layers_trains_from_the_same_cache(chain):
    sets = [word for name, value in {**TRAIN, "optim.steps": 4, "model.block_size": 6}.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    out = chain["folder"] / "second"
    dflash("train", "--cache", chain["cache"], "--out", out, *sets, "--set", "model.target_layer_ids=[1,3]", lonely=True)
    dflash("export", out, "--to", chain["folder"] / "second-drafter", lonely=True)
    config = json.loads((chain["folder"] / "second-drafter" / "config.json").read_text())
    assert (config["block_size"], config["dflash_config"]["target_layer_ids"]) == (6, [1, 3])


def test_dry_run_imports_no_torch(write_cache, tmp_path: Path):
    cache, _, _ = write_cache()
    code = (
        f"import sys; from dflash_cache.cli import main; main(['train', '--cache', {str(cache)!r}, '--out', {str(tmp_path / 'r')!r}, '--dry-run',"
        " '--set', 'model.mask_token_id=0', '--set', 'model.block_size=4'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gamma"] == 4.0
    assert not (tmp_path / "r").exists()


@pytest.mark.vllm
def test_the_doctor_finds_nothing_wrong_with_the_chain(chain):
    """Trainer, plain reading and engine draft the same blocks on the same texts."""
    where = ["--cache", chain["cache"], "--run", chain["run"], "--drafter", chain["drafter"]]
    found = dflash("doctor", *where, "--engine", "vllm", "--model", chain["target"], "--limit", 6)
    trainer, folder, engine = found["ways"]
    assert found["agree"] is True
    assert engine["tau"] > 2.5
    assert engine["tau"] == pytest.approx(folder["tau"], rel=0.05)
    assert trainer["steps"] > 20
    assert found["partings"][1]["agreement"] > 0.95
