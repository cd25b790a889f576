"""What teacher tokens kept in the cache save: bytes and seconds of an epoch with and without them, side by side.

    python benchmarks/targets.py                      SmolLM2's sizes, 8,192 tokens, a drafter of one layer
    python benchmarks/targets.py --tokens 100000 --hidden 4096 --vocab 151936 --device cuda --drafter-layers 5

The cache is synthetic and goes through the real writer. `first run` computes the tokens and keeps them, and then trains; `later run` finds
them. Losses of all three runs are compared.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from builders import make_spec, write_target_files

from dflash_cache.common import layout
from dflash_cache.common.sample import Sample
from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.loader import RowLoader
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.run import run
from dflash_cache.train.target_head import TargetHead

LAYERS = 5


def build(cache: Path, tokens: int, hidden: int, vocab: int) -> None:
    """Samples of 100 to 400 tokens, the first quarter of each unsupervised."""
    spec = make_spec(hidden=hidden, vocab=vocab, layer_ids=tuple(range(LAYERS)), num_layers=LAYERS + 1, chunk_tokens=512, part_tokens=4096)
    open_cache(cache, spec)
    write_target_files(cache, spec)
    writer, rng = CacheWriter(cache, spec), np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 0.6, (LAYERS + 1, hidden))).astype(np.float32)
    states = ((rng.standard_normal((400, LAYERS + 1, hidden), np.float32) * scale).view(np.uint32) >> 16).astype(np.uint16)
    number = 0
    while tokens > 0:
        length = int(rng.integers(100, 400))
        ids, mask = rng.integers(4, vocab, length).astype(np.int32), np.ones(length, np.uint8)
        mask[: length // 4] = 0
        here = states[rng.permutation(400)[:length]]
        writer.add(Sample(number.to_bytes(16, "little"), "benchmark", number, ids, mask, here[:, :-1], here[:, -1], 5, -1))
        tokens, number = tokens - length, number + 1
    writer.close()


def bytes_read(reader: CacheReader, verifier: bool) -> int:
    """Of an epoch that reads each chunk once: the shards, and the kept tokens instead of the verifier's."""
    arrays = [layout.HIDDEN_STATES, *([layout.VERIFIER] if verifier else [])]
    total = sum(entry.size for part in reader.parts for name, entry in part.manifest.files.items() if name.split("/")[0] in arrays and "/c/" in name)
    return total + (0 if verifier else 4 * reader.num_tokens)


def loading_seconds(reader: CacheReader, row_tokens: int, verifier: bool) -> float:
    """Best of three epochs of rows that nobody uses."""
    loader = RowLoader([reader], layer_ids=None, row_tokens=row_tokens, need_verifier=verifier, seed=0)
    times = []
    for epoch in range(3):
        began = time.perf_counter()
        for _ in loader.epoch(epoch):
            pass
        times.append(time.perf_counter() - began)
    loader.close()
    return min(times)


def main() -> None:
    """Print a line for each kind of run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--anchors-per-row", type=int, default=64)
    parser.add_argument("--drafter-layers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    sections = {
        "data": {"row_tokens": options.row_tokens},
        "model": {"block_size": 8, "num_layers": options.drafter_layers, "mask_token_id": 0},
        "loss": {"anchors_per_row": options.anchors_per_row},
        "optim": {"epochs": options.epochs},
    }
    importlib.import_module("dflash_cache.train.trainer")  # seconds that belong to none of the runs
    asked = [0]
    original = TargetHead.teacher_tokens

    def counting(head: TargetHead, states: torch.Tensor) -> torch.Tensor:
        asked[0] += len(states)
        return original(head, states)

    TargetHead.teacher_tokens = counting  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        build(cache, options.tokens, options.hidden, options.vocab)
        reader, losses = CacheReader(cache), []
        print(f"{reader.num_samples:,} samples, {reader.num_tokens:,} tokens, {len(reader.parts)} parts, {options.epochs} epochs on {options.device}")
        print(f"{'':12} {'MB an epoch':>12} {'loading, s':>11} {'before, s':>10} {'an epoch, s':>12} {'rows through the head':>22}")
        for title, store in (("without", False), ("first run", True), ("later run", True)):
            out, asked[0], began = Path(folder) / title.replace(" ", "-"), 0, time.perf_counter()
            own = {"device": options.device, "store_targets": store, "trackers": (), "log_every": 1}
            summary = run(TrainConfig.model_validate({**sections, "run": own}), [cache], out)
            before = time.perf_counter() - began - summary.seconds
            losses.append([json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()])
            size, loading = bytes_read(reader, not store) / 1e6, loading_seconds(reader, options.row_tokens, not store)
            print(f"{title:12} {size:12,.2f} {loading:11.3f} {before:10.2f} {summary.seconds / options.epochs:12.2f} {asked[0]:22,}")
            shutil.rmtree(out)
        kept = sum(path.stat().st_size for path in (cache / layout.TARGETS).rglob("*") if path.is_file())
        print(f"kept: {kept:,} bytes, {kept / reader.num_tokens:.1f} a token; losses {'equal' if losses[0] == losses[1] == losses[2] else 'DIFFER'}")


if __name__ == "__main__":
    main()
