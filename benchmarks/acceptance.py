"""One acceptance length, four ways: offline, the trainer's step, a plain forward pass, and vLLM; for several kinds of drafters.

    python benchmarks/acceptance.py --cache demo/cache --held-out demo/held-out --model demo/smollm2-135m-instruct --data demo/held-out.jsonl

Trains one small drafter a kind from the same cache, exports it, and asks: `dflash eval` offline over the held-out cache, `dflash
doctor` (trainer, plain forward of the exported folder, every block that vLLM drafts, on the first documents), and `dflash eval
--engine vllm` over the held-out prompts, by the server's own counters. Intervals are 95 %, over documents or prompts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

KINDS = {
    "block 4": ["model.block_size=4"],
    "block 8": ["model.block_size=8"],
    "block 16": ["model.block_size=16"],
    "block 8, window 64": [
        "model.block_size=8",
        "model.sliding_window=64",
        "model.layer_types=[sliding_attention, sliding_attention]",
    ],
}
FIXED = ["data.row_tokens=1024", "model.num_layers=2", "loss.anchors_per_row=96", "optim.lr=1e-3", "run.trackers=[]"]


def dflash(*arguments: str) -> dict[str, Any]:
    """One command; its --json document. Exit code 1 of `doctor` is a result too."""
    done = subprocess.run([sys.executable, "-m", "dflash_cache", *arguments, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"dflash {' '.join(arguments)} failed with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def between(value: float, interval: Any) -> str:
    """A number and its interval."""
    return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else f"{value:.3f}"


def main() -> None:
    """Train, measure, print one line a kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cache", "held-out", "model", "data"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=240, help="of training (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=8, help="that the doctor replays (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=48, help="that are served (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="of a served answer (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="(default: all)")
    options = parser.parse_args()
    header = f"{'drafter':20} {'offline, all':22} {'served':22} {'answers differ':>14}   doctor: trainer, plain forward, vLLM's blocks"
    print(header, flush=True)
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            run, drafter = str(Path(folder, "run")), str(Path(folder, "drafter"))
            sets = [part for value in (*FIXED, *KINDS[kind], f"optim.steps={options.steps}") for part in ("--set", value)]
            dflash("train", "--cache", options.cache, "--out", run, *sets)
            dflash("export", run, "--to", drafter)
            offline = dflash("eval", "--cache", options.held_out, "--drafter", run)
            engine = ["--engine", "vllm", "--model", options.model]
            limits = ["--limit", str(options.prompts), "--max-new-tokens", str(options.max_new_tokens)]
            served = dflash("eval", *engine, "--drafter", drafter, "--data", options.data, *limits)
            told = dflash("doctor", "--cache", options.held_out, "--run", run, "--drafter", drafter, *engine, "--limit", str(options.documents))
        ways = ", ".join(between(way["tau"], (way["low"], way["high"])) for way in told["ways"])
        print(
            f"{kind:20} {between(offline['tau_walk'], offline['confidence']['tau_walk']):22} {between(served['tau'], served.get('tau_interval')):22} "
            f"{served['differing_outputs']:>7} of {served['prompts']:<3}   {ways}; {'agree' if told['agree'] else 'PART'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
