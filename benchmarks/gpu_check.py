"""The whole chain on one GPU, on a random Qwen3-shaped target made here: nothing is downloaded.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --hidden 64 --depth 6 --rows 24 --steps 20      the same in small, also on a CPU

Extracts with vLLM and with transformers, compares their states layer by layer, verifies, trains with flex attention and
with the dense mask and compares the losses, evaluates, exports. Prints a table; exits 1 when something does not agree.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/extract")]

from tiny_target import build_target, chat, write_jsonl  # noqa: E402

from dflash_cache.train.reader import CacheReader  # noqa: E402


def dflash(*arguments: object) -> dict[str, Any]:
    """Run one verb with --json."""
    words = [str(argument) for argument in arguments]
    print("dflash", *words, flush=True)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "dflash_cache", *words, "--json", "--debug"], stdout=subprocess.PIPE, text=True)
    print(f"  {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        print(done.stdout)
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def floats(bits: np.ndarray) -> np.ndarray:
    """bfloat16 patterns as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def compare(one: Path, two: Path) -> tuple[list[float], float, int]:
    """(relative error per layer with the verifier last, share with the same engine token, samples in both)."""
    left, right = CacheReader(one), CacheReader(two)
    where = {right.read_sample(number).key: number for number in range(right.num_samples)}
    errors, same = [], 0
    for number in range(left.num_samples):
        a = left.read_sample(number)
        if a.key not in where:
            continue
        b = right.read_sample(where[a.key])
        x, y = (floats(np.concatenate([s.hidden_states, s.verifier_last_hidden_states[:, None]], 1)) for s in (a, b))
        errors.append(np.linalg.norm(x - y, axis=(0, 2)) / np.linalg.norm(y, axis=(0, 2)))
        same += a.engine_top1 == b.engine_top1
    return np.mean(errors, 0).tolist(), same / len(errors), len(errors)


def main() -> None:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 1024), ("depth", 28), ("rows", 256), ("steps", 60), ("compared", 64)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        heads = max(options.hidden // 64, 2)
        sizes = {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "num_hidden_layers": options.depth}
        shape = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 64, "initializer_range": 1.2 / options.hidden**0.5}
        target = build_target(folder / "target", "qwen3", **sizes, **shape)

        def words(least: int, most: int) -> str:
            return "".join(rng.choice("abcdefgh ijklmnop") for _ in range(rng.randint(least, most)))

        data = write_jsonl(folder / "data.jsonl", [chat(words(50, 700), words(50, 700)) for _ in range(options.rows)])
        common = ["--model", target, "--data", data, "--max-length", 1800]
        by_vllm = dflash("extract", *common, "--cache", folder / "vllm")
        by_transformers = dflash("extract", *common, "--cache", folder / "transformers", "--engine", "transformers", "--limit", options.compared)
        generated = dflash("extract", *common, "--cache", folder / "generated", "--generate", "--max-new-tokens", 64)
        verified = {name: dflash("verify", folder / name) for name in ("vllm", "transformers", "generated")}
        errors, same, compared = compare(folder / "vllm", folder / "transformers")
        settings = ["--set", "data.row_tokens=2048", "--set", "model.num_layers=2", "--set", "loss.anchors_per_row=128", "--set", "run.log_every=1"]
        settings += ["--set", f"optim.steps={options.steps}", "--set", "run.trackers=[]"]
        losses = {}
        for attention in ("auto", "dense"):
            run = folder / f"run-{attention}"
            dflash("train", "--cache", folder / "generated", "--out", run, *settings, "--set", f"run.attention={attention}")
            losses[attention] = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        offline = dflash("eval", "--cache", folder / "vllm", "--drafter", folder / "run-auto", "--limit", 32)
        dflash("export", folder / "run-auto", "--to", folder / "drafter")
    gap = max(abs(a - b) / b for a, b in zip(losses["auto"][:10], losses["dense"][:10], strict=True))
    fidelity = min(result["fidelity"] for result in verified.values())
    print(
        f"\nvLLM: {by_vllm['tokens']:,} tokens, {by_vllm['tokens_per_second']:,.0f} tokens/s; generating {generated['tokens_per_second']:,.0f} tokens/s"
    )
    print(f"transformers: {by_transformers['tokens_per_second']:,.0f} tokens/s")
    print(f"relative error by layer, verifier last: {' '.join(f'{error:.4f}' for error in errors)}; same next token {same:.1%} of {compared}")
    print(f"fidelity, lowest of three caches: {fidelity:.2%}; bytes of raw: {by_vllm['ratio_to_raw']:.3f}")
    print(f"loss, first and last: {losses['auto'][0]:.4f} {losses['auto'][-1]:.4f}; attention forms differ by {gap:.2%} at most in 10 steps")
    print(f"offline tau {offline['tau_walk']:.3f}")
    if fidelity < 0.98 or same < 0.9 or max(errors) > 0.1 or gap > 0.02:
        sys.exit(1)


if __name__ == "__main__":
    main()
