"""Extraction against plain prefill: tokens/s, bytes and cores, the same prompts each way, each way in an engine of its own.

    python benchmarks/extraction.py                                          Qwen3-8B's sizes, random weights (GPU)
    python benchmarks/extraction.py --shape qwen36-27b                       a hybrid target: 48 of 64 blocks linear attention (GPU)
    python benchmarks/extraction.py --model ./SmolLM2 --prompts 24 --max-tokens 512 --batched-tokens 2048        (CPU)

Ways: vLLM alone | vLLM's ExampleHiddenStatesConnector, raw safetensors (CUDA only) | `dflash extract` at 7 bits into memory (/dev/shm), at 7
and at 3 bits onto the disk. Seconds are from the first document until the last part is published, all checksums and fsyncs included; an
engine's start is not. Cores: CPU seconds of all processes in that time. After each of ours `dflash verify` must say OK.

Without --model the weights are those of vLLM's `load_format=dummy`, uniform within 1e-3: states are finite but nothing like a trained
model's (every block adds next to nothing, and all logits are near ties): neither the ratio to raw nor fidelity says anything. No network.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/extract")]

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "config": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
        "prefix": "model.",
        "engine_args": {},
        "flags": [],
    },
    "qwen36-27b": {
        "config": {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "text_config": {
                "model_type": "qwen3_5_text",
                "hidden_size": 5120,
                "intermediate_size": 17_408,
                "num_hidden_layers": 64,
                "num_attention_heads": 24,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 48,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_conv_kernel_dim": 4,
                "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
                "vocab_size": 248_320,
                "max_position_embeddings": 262_144,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": False,
                "dtype": "bfloat16",
            },
        },
        "prefix": "model.language_model.",
        "engine_args": {"language_model_only": True, "gdn_prefill_backend": "triton", "enforce_eager": True},
        "flags": ["--layers", "1,16,31,46,61", "--verifier-layer", "63"],
    },
}


def text_sizes(folder: Path) -> dict[str, Any]:
    """The sizes of the text model in a target's config."""
    config = json.loads((folder / "config.json").read_text())
    return dict(config.get("text_config") or config)


# ---- what a child process does


def make_target(folder: Path, shape: str) -> None:
    """config.json, a byte tokenizer, and of the weights only embedding, head and norm, as `load_format=dummy` will make them."""
    import torch
    from safetensors.torch import save_file
    from tiny_target import build_tokenizer
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    config, prefix = SHAPES[shape]["config"], SHAPES[shape]["prefix"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    build_tokenizer().save_pretrained(folder)
    sizes = config.get("text_config", config)
    rows, width = sizes["vocab_size"], sizes["hidden_size"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {}
    for name, size in ((f"{prefix}embed_tokens.weight", (rows, width)), ("lm_head.weight", (rows, width)), (f"{prefix}norm.weight", (width,))):
        tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
        initialize_single_dummy_weight(tensor)
        tensors[name] = tensor.cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def prefill(job: dict[str, Any]) -> dict[str, Any]:
    """vLLM over the prompts; with `job["raw"]`, its example connector writes the states there. Answers when it began and ended."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    from dflash_cache.extract.vllm_setup import cpu_arguments, quiet_environment

    arguments = {**job["arguments"], "skip_tokenizer_init": True, "disable_log_stats": True}
    if job["raw"]:
        Path(job["raw"]).mkdir(parents=True)
        capture = {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["vllm_ids"]}}
        arguments["speculative_config"] = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": capture}
        arguments["kv_transfer_config"] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": job["raw"]},
        }
    with quiet_environment():
        llm = LLM(**{**arguments, **cpu_arguments(), **job["engine_args"]})
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        began = time.time()
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False), use_tqdm=False)
        if job["raw"]:
            from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

            load_hidden_states(outputs[-1].kv_transfer_params["hidden_states_path"])  # waits until it is written
            while len(list(Path(job["raw"]).glob("*.safetensors"))) < len(prompts):
                time.sleep(0.005)
        ended = time.time()
    stored = sum(path.stat().st_size for path in Path(job["raw"]).glob("*.safetensors")) if job["raw"] else 0
    return {"began": began, "ended": ended, "tokens": sum(len(ids) for ids in job["prompts"]), "stored_bytes": stored}


def extract(job: dict[str, Any]) -> dict[str, Any]:
    """What `dflash extract` runs, with its fidelity check beside it unless `job["check"]` is false."""
    from dflash_cache.extract.config import ExtractConfig
    from dflash_cache.extract.run import run
    from dflash_cache.train.fidelity import TeacherCheck

    config = ExtractConfig(**job["config"])
    summary = run(config, TeacherCheck if job["check"] else None)
    events = [json.loads(line) for line in (config.cache / "extract.log.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "part"][-1]
    began = datetime.fromisoformat(last["time"]).timestamp() - last["seconds"]
    ended = (config.cache / "parts").stat().st_mtime  # the last rename; the log's last line also waits for the engine to go
    return {"began": began, "ended": ended, "tokens": summary.tokens, "stored_bytes": summary.stored_bytes}


# ---- the parent


class CpuMeter:
    """CPU seconds of a process and all that it started, over time."""

    def __init__(self, process: int) -> None:
        self._samples: list[tuple[float, float]] = []
        self._seen: dict[int, float] = {}
        self._root = psutil.Process(process)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            try:
                processes = [self._root, *self._root.children(recursive=True)]
            except psutil.Error:
                return
            for process in processes:
                try:
                    times = process.cpu_times()
                    self._seen[process.pid] = times.user + times.system  # of one that has ended the last figure stays
                except psutil.Error:
                    continue
            self._samples.append((time.time(), sum(self._seen.values())))

    def stop(self) -> None:
        """No more samples."""
        self._stop.set()
        self._thread.join()

    def between(self, began: float, ended: float) -> float:
        """CPU seconds spent in that time, to the nearest sample."""

        def at(moment: float) -> float:
            return min(self._samples, key=lambda sample: abs(sample[0] - moment))[1]

        return at(ended) - at(began)


def child(action: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run one action in a process of its own; its answer, with the cores it used."""
    with tempfile.NamedTemporaryFile("w+", suffix=".json") as asked, tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        json.dump(job, asked)
        asked.flush()
        process = subprocess.Popen([sys.executable, __file__, "--child", action, asked.name, answer.name], stdout=sys.stderr)
        meter = CpuMeter(process.pid)
        code = process.wait()
        meter.stop()
        if code:
            sys.exit(f"{action} failed with exit code {code}")
        found = json.loads(answer.read() or "{}")
    if "began" in found:
        seconds = found["ended"] - found["began"]
        cpu = meter.between(found["began"], found["ended"])
        found |= {"seconds": seconds, "cpu_seconds": cpu, "cores": cpu / seconds}
    return found


def verified(cache: Path) -> dict[str, Any]:
    """What `dflash verify --json` says."""
    done = subprocess.run([sys.executable, "-m", "dflash_cache", "verify", str(cache), "--json"], stdout=subprocess.PIPE, text=True)
    document = json.loads(done.stdout)
    return {"ok": done.returncode == 0, "fidelity": document.get("fidelity"), "problems": document.get("problems", [])[:3]}


def main() -> None:
    """Measure each way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="sizes of a target without weights (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a target with weights instead")
    parser.add_argument("--prompts", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--min-tokens", type=int, default=None, help="of the shortest prompt (default: a sixth of the longest)")
    parser.add_argument("--max-tokens", type=int, default=3071, help="of the longest prompt (default: %(default)s)")
    parser.add_argument("--batched-tokens", type=int, default=16_384, help="of a step (default: %(default)s)")
    parser.add_argument("--part-tokens", type=int, default=131_072, help="of a part (default: %(default)s)")
    parser.add_argument("--disk", type=Path, default=Path(), help="a folder on the disk to write to (default: the current one)")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder in memory (default: %(default)s)")
    parser.add_argument("--ways", default="plain,example,7-memory,7-disk,3-disk", help="which, and in which order (default: %(default)s)")
    parser.add_argument("--no-check", dest="check", action="store_false", help="without the fidelity check, which runs beside the engine")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="extraction-", dir=options.disk))
    memory = Path(tempfile.mkdtemp(prefix="extraction-", dir=options.memory))
    try:
        rows = measure(options, scratch, memory)
    finally:
        shutil.rmtree(scratch)
        shutil.rmtree(memory)
    if options.json:
        print(json.dumps({"shape": str(options.model or options.shape), "prompts": options.prompts, "ways": rows}, indent=2))
    if any(not row.get("ok", True) for row in rows):
        sys.exit(1)


def measure(options: argparse.Namespace, scratch: Path, memory: Path) -> list[dict[str, Any]]:
    """One row for each way."""
    shape = SHAPES[options.shape]
    if options.model is None:
        target, engine_args = scratch / "target", {"load_format": "dummy", **shape["engine_args"]}
        child("target", {"folder": str(target), "shape": options.shape})
        flags = dict(zip(shape["flags"][::2], shape["flags"][1::2], strict=True))
    else:
        target, engine_args, flags = options.model, {}, {}
    sizes, rng = text_sizes(target), random.Random(0)
    least = options.min_tokens or options.max_tokens // 6 + 1
    prompts = [
        [rng.randrange(16, min(sizes["vocab_size"], 100_000)) for _ in range(rng.randint(least, options.max_tokens))] for _ in range(options.prompts)
    ]
    data = scratch / "tokens.jsonl"
    data.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n" for ids in prompts))
    from dflash_cache.common.layers import default_layer_ids
    from dflash_cache.extract.vllm_setup import CPU_SEQUENCES, GPU_SEQUENCES

    depth = sizes["num_hidden_layers"]
    layers = [int(layer) for layer in flags["--layers"].split(",")] if flags else list(default_layer_ids(depth))
    verifier = int(flags.get("--verifier-layer", depth - 1))
    raw_bytes = 2 * sizes["hidden_size"] * (len(layers) + 1)
    sequences = GPU_SEQUENCES if on_cuda() else CPU_SEQUENCES
    engine_args = {"max_num_batched_tokens": options.batched_tokens, "max_num_seqs": sequences, **engine_args}
    arguments = {"model": str(target), "dtype": "bfloat16", "max_model_len": options.max_tokens + 1, "enable_prefix_caching": False}
    plain = {"arguments": arguments, "engine_args": engine_args, "prompts": prompts, "raw": "", "vllm_ids": []}
    rows: list[dict[str, Any]] = []
    for way in options.ways.split(","):
        if way == "example" and not on_cuda():
            continue
        if way in ("plain", "example"):
            raw = str(memory / "raw") if way == "example" else ""
            ids = sorted({layer + 1 for layer in (*layers, verifier)})
            found = child("prefill", {**plain, "raw": raw, "vllm_ids": ids})
            shutil.rmtree(raw, ignore_errors=True) if raw else None
        else:
            bits, place = way.split("-")
            cache = (memory if place == "memory" else scratch) / "cache"
            config = {"model": str(target), "data": [str(data)], "data_format": "tokens", "cache": str(cache), "layers": layers}
            config |= {"verifier_layer": verifier, "mantissa_bits": int(bits), "max_length": options.max_tokens, "engine_args": engine_args}
            found = child("extract", {"config": config | {"part_tokens": options.part_tokens}, "check": options.check})
            found |= verified(cache)
            shutil.rmtree(cache)
        found |= {"way": way, "tokens_per_second": found["tokens"] / found["seconds"]}
        found |= {"raw_gb_per_second": found["tokens_per_second"] * raw_bytes / 1e9 if way != "plain" else 0.0}
        found |= {"of_raw": found["stored_bytes"] / (found["tokens"] * raw_bytes)}
        rows.append(found)
        first = next((row for row in rows if row["way"] == "plain"), None)
        found["of_plain"] = found["tokens_per_second"] / first["tokens_per_second"] if first else None
        if not options.json:
            print_row(found, header=len(rows) == 1, raw_bytes=raw_bytes)
    return rows


def on_cuda() -> bool:
    """Is there a CUDA device? Asked without starting CUDA in this process."""
    return shutil.which("nvidia-smi") is not None and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0


def print_row(row: dict[str, Any], *, header: bool, raw_bytes: int) -> None:
    """One line of the table."""
    if header:
        print(f"{row['tokens']:,} tokens, {raw_bytes:,} bytes of raw states a token")
        print(f"{'way':10} {'tokens/s':>9} {'of plain':>9} {'raw GB/s':>9} {'stored GB':>10} {'of raw':>7} {'cores':>6} {'CPU s':>7}  verify")
    of_plain = f"{row['of_plain']:9.3f}" if row["of_plain"] else f"{'':9}"
    proof = f"  {'OK' if row['ok'] else 'FAILED ' + str(row['problems'])}, fidelity {row['fidelity']}" if "ok" in row else ""
    print(
        f"{row['way']:10} {row['tokens_per_second']:9,.0f} {of_plain} {row['raw_gb_per_second']:9.2f} {row['stored_bytes'] / 1e9:10.2f} "
        f"{row['of_raw']:7.3f} {row['cores']:6.1f} {row['cpu_seconds']:7.1f}{proof}",
        flush=True,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        action, asked, answer = sys.argv[2:]
        job = json.loads(Path(asked).read_text())
        if action == "target":
            make_target(Path(job["folder"]), job["shape"])
        else:
            Path(answer).write_text(json.dumps({"prefill": prefill, "extract": extract}[action](job)))
    else:
        main()
