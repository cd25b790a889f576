"""How long `dflash train` takes from its start to its first row on a cache of ten million samples, and what the index takes in memory.

    python benchmarks/index.py --samples 10000000 --parts 7630 --length 100
    python benchmarks/index.py --samples 100000 --parts 100            a few seconds

The parts are one part's files linked under other names, so that nothing but metadata is made; states are 8 wide and the loader's
buffer is as much smaller than at width 4096, so that pools and rows ahead are those of a real run. The target's head, the drafter
and compilation are left out. A part of 131,072 tokens (the default of `dflash extract`) is 1,310 samples of 100 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from builders import link_parts, make_spec, write_target_files

from dflash_cache.common.sample import Sample
from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.loader import BUFFER_BYTES, RowLoader
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.resolve import make_plan
from dflash_cache.train.work import Position, total_steps, work

WIDTH, REAL_WIDTH = 8, 4096
R = TypeVar("R")


def build(cache: Path, samples: int, parts: int, length: int) -> None:
    """`parts` parts of samples / parts samples of about `length` tokens each, with the 12 shards of the reference case."""
    spec = make_spec(hidden=WIDTH, layer_ids=(1, 16, 31, 46, 61), num_layers=64, chunk_tokens=512, part_tokens=1 << 40)
    open_cache(cache, spec)
    write_target_files(cache, spec)
    writer, rng = CacheWriter(cache, spec), np.random.default_rng(0)
    for number in range(samples // parts):
        tokens = max(round(rng.lognormal(np.log(length) - 0.32, 0.8)), 2)
        states = np.zeros((tokens, 6, WIDTH), np.uint16)
        ids, mask = rng.integers(4, 32, tokens).astype(np.int32), (np.arange(tokens) >= tokens // 3).astype(np.uint8)
        writer.add(Sample(number.to_bytes(16, "little"), "benchmark", number, ids, mask, states[:, :-1], states[:, -1], 5, -1))
    writer.close()
    link_parts(cache, parts)


def anonymous_bytes() -> int:
    """Private memory of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


class Laps:
    """Wall clock and processor seconds of each stage; on a busy machine they are far apart."""

    def __init__(self) -> None:
        self.lines: dict[str, tuple[float, float]] = {}

    def of(self, name: str, stage: Callable[[], R]) -> R:
        """What `stage` returns."""
        wall, processor = time.perf_counter(), time.process_time()
        found = stage()
        self.lines[name] = time.perf_counter() - wall, time.process_time() - processor
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=1000)
    parser.add_argument("--length", type=int, default=100, help="mean tokens of a sample (default: %(default)s)")
    parser.add_argument("--epochs", type=float, default=6.0, help="the rows of each are counted at the start (default: %(default)s)")
    parser.add_argument("--eval-fraction", type=float, default=0.0, help="of the samples, held out by their keys' hashes (default: %(default)s)")
    parser.add_argument("--cache", type=Path, help="a folder to keep the cache in, or that holds it from an earlier time")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or Path(folder) / "cache"
        if not cache.exists():
            build(cache, options.samples, options.parts, options.length)
        laps, before = Laps(), anonymous_bytes()
        reader = laps.of("index of the cache, opened alone", lambda: CacheReader(cache))
        index_bytes = anonymous_bytes() - before
        settings = {"optim": {"steps": None, "epochs": options.epochs}, "data": {"eval_fraction": options.eval_fraction}}
        config = TrainConfig.model_validate(settings)
        plan = laps.of("plan: index, tokens, split, anchors", lambda: make_plan(config, [cache]))
        rows = laps.of(
            "loader: windows",
            lambda: RowLoader(
                plan.samples.readers,
                layer_ids=plan.drafter.target_layer_ids,
                row_tokens=config.data.row_tokens,
                need_verifier=True,
                seed=0,
                chosen=plan.samples.chosen,
                buffer_bytes=BUFFER_BYTES * WIDTH // REAL_WIDTH,
            ),
        )
        steps = laps.of(f"rows of {options.epochs:g} epochs, counted", lambda: total_steps(config.optim, rows))
        laps.of("first row", lambda: next(next(work(rows, Position(), config.optim)).mine))
        rows.close()
    whole = [sum(times[clock] for name, times in list(laps.lines.items())[1:]) for clock in (0, 1)]
    if options.json:
        stages = {name: {"seconds": wall, "processor_seconds": processor} for name, (wall, processor) in laps.lines.items()}
        print(json.dumps({"samples": reader.num_samples, "parts": len(reader.parts), "stages": stages, "seconds": whole[0], "steps": steps}))
        return
    print(f"{reader.num_samples:,} samples, {reader.num_tokens:,} tokens in {len(reader.parts):,} parts; index {index_bytes / 1e6:,.0f} MB")
    print(f"{'':44} {'seconds':>8} {'processor':>10}")
    for name, (wall, processor) in [*laps.lines.items(), ("from the plan to the first row", (whole[0], whole[1]))]:
        print(f"{name:44} {wall:8.2f} {processor:10.2f}")


if __name__ == "__main__":
    main()
