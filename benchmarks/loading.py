"""From cache files to rows of bfloat16 tensors: speed, memory, and how often a chunk is decoded.

    python benchmarks/loading.py                      2 GB of raw states, width 4096, 5 + 1 layers, rows of 8,192 tokens
    python benchmarks/loading.py --copies 16          the same files under 16 names: a cache larger than memory
    python benchmarks/loading.py --cache demo/cache   a real cache

GB/s count raw bfloat16 bytes of the layers that are read. The factor is chunks decoded over chunks there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from builders import link_parts, make_spec

from dflash_cache.common.sample import Sample
from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train import reader as reader_module
from dflash_cache.train.loader import BUFFER_BYTES, RowLoader
from dflash_cache.train.reader import CacheReader

LAYERS, HIDDEN = 5, 4096


def build(cache: Path, tokens: int, copies: int) -> None:
    """Synthetic samples of 16 to 2,000 tokens, a part of all of them, and the same files under `copies` - 1 other names."""
    spec = make_spec(hidden=HIDDEN, layer_ids=tuple(range(LAYERS)), num_layers=LAYERS + 1, chunk_tokens=512, part_tokens=1 << 40)
    open_cache(cache, spec)
    writer, rng = CacheWriter(cache, spec), np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 0.6, (LAYERS + 1, HIDDEN))).astype(np.float32)
    states = ((rng.standard_normal((2000, LAYERS + 1, HIDDEN), np.float32) * scale).view(np.uint32) >> 16).astype(np.uint16)
    for number, length in enumerate(rng.lognormal(5.8, 0.8, 1 << 20).clip(16, 2000).astype(int).tolist()):
        if tokens <= 0:
            break
        ids, mask = np.full(length, 5, np.int32), np.ones(length, np.uint8)
        writer.add(Sample(number.to_bytes(16, "little"), "benchmark", number, ids, mask, states[:length, :-1], states[:length, -1], 5, -1))
        tokens -= length
    writer.close()
    link_parts(cache, copies)


def anonymous_bytes() -> int:
    """Private memory of this process; maps of files are not counted."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def measure(cache: Path, title: str, row_tokens: int, buffer_bytes: int, **options: object) -> None:
    """One epoch, its rows looked at and dropped; a second one for the speed with warm memory."""
    decoded = [0]
    original = reader_module._Shard.decompressed

    def counting(shard: reader_module._Shard, number: int, size: int) -> np.ndarray:
        decoded[0] += 1
        return original(shard, number, size)

    reader_module._Shard.decompressed = counting  # type: ignore[method-assign]
    reader = CacheReader(cache)
    settings = {"layer_ids": None, "need_verifier": True, **options}
    loader = RowLoader([reader], row_tokens=row_tokens, seed=0, buffer_bytes=buffer_bytes, **settings)  # type: ignore[arg-type]
    arrays = len(loader._slots[0]) + bool(settings["need_verifier"])
    before, most = anonymous_bytes(), 0
    for epoch in range(2):
        began = time.perf_counter()
        for _ in loader.epoch(epoch):
            most = max(most, anonymous_bytes() - before)
        seconds = time.perf_counter() - began
    loader.close()
    reader_module._Shard.decompressed = original  # type: ignore[method-assign]
    chunks = arrays * sum(part.manifest.num_chunks for part in reader.parts)
    states = reader.num_tokens * arrays * reader.spec.hidden_size * 2
    print(f"{title:44} {states / seconds / 1e9:6.2f} {decoded[0] / 2 / chunks:8.3f} {most / 1e9:9.2f}")


def main() -> None:
    """Print one line for each way of reading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="read this cache instead of a synthetic one")
    parser.add_argument("--tokens", type=int, default=40_960, help="of the synthetic part (default: %(default)s)")
    parser.add_argument("--copies", type=int, default=1, help="names of the synthetic part (default: %(default)s)")
    parser.add_argument("--row-tokens", type=int, default=8192, help="tokens in a row (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or Path(folder) / "cache"
        if not options.cache:
            build(cache, options.tokens, options.copies)
        found = CacheReader(cache)
        print(f"{found.num_samples:,} samples, {found.num_tokens:,} tokens, {found.num_tokens * found.spec.raw_bytes_per_token / 1e9:.1f} GB raw")
        print(f"{'':44} {'GB/s':>6} {'factor':>8} {'memory GB':>9}")
        rows = options.row_tokens
        measure(cache, "all layers and the verifier", rows, BUFFER_BYTES)
        measure(cache, "all layers, no verifier", rows, BUFFER_BYTES, need_verifier=False)
        measure(cache, "one layer, no verifier", rows, BUFFER_BYTES, need_verifier=False, layer_ids=found.spec.layer_ids[:1])
        measure(cache, "all, rows of 2,048, a buffer of 512 MB", 2048, 512 << 20)


if __name__ == "__main__":
    main()
