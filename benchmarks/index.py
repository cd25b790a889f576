"""How long it takes to open a cache of a million samples, and what its index takes in memory.

python benchmarks/index.py [--samples 1000000] [--parts 1000]

The parts are one part's files linked under other names, so that nothing but metadata is made. A part of 131,072 tokens (the
default) holds 131 samples of 1,000 tokens; a million samples of that length are 7,630 parts.
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
from dflash_cache.train.reader import CacheReader


def build(cache: Path, samples: int, parts: int) -> None:
    """`parts` parts of samples / parts one-token samples each, with the 12 shards of the reference case."""
    spec = make_spec(hidden=8, layer_ids=(1, 16, 31, 46, 61), num_layers=64, chunk_tokens=512, part_tokens=1 << 40)
    open_cache(cache, spec)
    writer = CacheWriter(cache, spec)
    states = np.zeros((1, 6, 8), np.uint16)
    ids, mask = np.full(1, 5, np.int32), np.ones(1, np.uint8)
    for number in range(samples // parts):
        writer.add(Sample(number.to_bytes(16, "little"), "benchmark", number, ids, mask, states[:, :-1], states[:, -1], 5, -1))
    writer.close()
    link_parts(cache, parts)


def anonymous_bytes() -> int:
    """Private memory of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        build(cache, options.samples, options.parts)
        before, times = anonymous_bytes(), []
        for _ in range(3):
            started = time.perf_counter()
            reader = CacheReader(cache)
            times.append(time.perf_counter() - started)
        print(
            f"{reader.num_samples:,} samples in {len(reader.parts):,} parts: opened in {min(times):.2f} s "
            f"({min(times) / len(reader.parts) * 1e3:.2f} ms a part), {(anonymous_bytes() - before) / 1e6:.0f} MB of memory"
        )


if __name__ == "__main__":
    main()
