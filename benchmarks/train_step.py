"""Seconds of a training step on synthetic states, through the real writer, loader and trainer.

    python benchmarks/train_step.py                         Qwen3-8B shape: H 4096, 5 layers, T 8192, 512 anchors, B 16, V 151,936
    python benchmarks/train_step.py --hidden 576 --vocab 49152 --row-tokens 1024 --anchors 96 --block 8 --layers 2 --features 5

Prints the tokens/s of each log window, the feeding included, and the peak device memory. The first windows compile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from builders import make_spec, to_bf16_bits

from dflash_cache.common import layout, target_folder
from dflash_cache.common.config import load
from dflash_cache.common.sample import Sample
from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.run import run


def write_cache(cache: Path, options: argparse.Namespace) -> None:
    """Rows of noise, documents of a quarter row, three quarters of each supervised."""
    spec = make_spec(
        hidden=options.hidden, vocab=options.vocab, layer_ids=range(1, options.features + 1), num_layers=36, chunk_tokens=512, part_tokens=131_072
    )
    open_cache(cache, spec)
    target = cache / layout.TARGET
    target.mkdir()
    shape = (options.vocab, options.hidden)
    tensors = {name: (torch.randn(shape) * 0.02).bfloat16() for name in ("embed_tokens.weight", "lm_head.weight")}
    save_file({**tensors, "norm.weight": torch.ones(options.hidden).bfloat16()}, target / layout.HEAD_FILE)
    heads = max(options.hidden // 128, 1)
    sizes = {"hidden_size": options.hidden, "vocab_size": options.vocab, "num_hidden_layers": 36, "intermediate_size": 3 * options.hidden}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": max(heads // 4, 1), "head_dim": 128, "rope_theta": 1e6, "model_type": "qwen3"}
    (target / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}))
    tokens = {"vocab_size": options.vocab, "tokenizer_size": options.vocab - 10, "mask_token_id": None, "pad_token_id": 2, "bos_token_id": None}
    (target / layout.TOKENS_JSON).write_text(json.dumps({**tokens, "eos_token_ids": [2], "special_token_ids": [0, 1, 2]}))
    target_folder.seal(target)
    rng, length = np.random.default_rng(0), options.row_tokens // 4
    states = to_bf16_bits(rng.standard_normal((length, options.features + 1, options.hidden), np.float32))
    mask = (np.arange(length) >= length // 4).astype(np.uint8)
    writer = CacheWriter(cache, spec)
    for number in range(4 * options.rows):
        ids = rng.integers(3, options.vocab - 10, length).astype(np.int32)
        shifted = np.roll(states, number, axis=2)
        writer.add(Sample(number.to_bytes(16, "little"), "noise", number, ids, mask, shifted[:, :-1], shifted[:, -1], 3, -1))
    writer.close()


def main() -> None:
    """Write, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("hidden", 4096),
        ("vocab", 151_936),
        ("features", 5),
        ("layers", 5),
        ("row-tokens", 8192),
        ("anchors", 512),
        ("block", 16),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="rows in the cache (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="more settings of the trainer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        write_cache(Path(folder, "cache"), options)
        print(f"wrote the cache in {time.monotonic() - began:.1f} s", flush=True)
        fixed = {
            "data.row_tokens": options.row_tokens,
            "model.block_size": options.block,
            "model.num_layers": options.layers,
            "loss.anchors_per_row": options.anchors,
            "optim.steps": options.steps,
            "run.log_every": 5,
            "run.checkpoint_every": 10**9,
            "run.trackers": [],
        }
        config = load(TrainConfig, file=None, overrides=options.set, fixed=fixed)
        summary = run(config, [Path(folder, "cache")], Path(folder, "run"))
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    for line in lines:
        rate = line["tokens_per_second"]
        print(f"steps to {line['step']:4}: {rate:10,.0f} tokens/s  {options.row_tokens / rate:7.4f} s a step  loss {line['loss']:.4f}")
    print(summary.to_text())
    if torch.cuda.is_available():
        print(f"peak device memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
