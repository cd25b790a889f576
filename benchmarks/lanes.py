"""How often chunks are decoded by several processes together, by the number of lanes. Counted from lengths; nothing is read.

    python benchmarks/lanes.py [--row-tokens 8192] [--length 400] [--tokens 6000000]

Chunks decoded by all processes in an epoch over chunks there, for rows of 5 + 1 layers of width 4096, and the share of rows that is padding.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_cache.train.config import OptimConfig
from dflash_cache.train.loader import RowLoader
from dflash_cache.train.scatter import Scatter
from dflash_cache.train.work import Position, work

PART_TOKENS, CHUNK_TOKENS = 131_072, 512


def index(tokens: int, mean: int) -> Any:
    """What the loader asks of a reader: lognormal lengths, parts as `dflash extract` closes them."""
    lengths = np.random.default_rng(0).lognormal(np.log(mean) - 0.32, 0.8, tokens // mean).clip(16, 8192).astype(np.int64)
    ends = np.cumsum(lengths)
    part_of = ((ends - 1) // PART_TOKENS).astype(np.int32)
    first = np.flatnonzero(np.diff(part_of, prepend=-1))
    sizes = np.add.reduceat(lengths, first).tolist()
    manifests = [SimpleNamespace(chunk_tokens=CHUNK_TOKENS, num_chunks=-(-size // CHUNK_TOKENS)) for size in sizes]
    return SimpleNamespace(
        path="index",
        num_samples=len(lengths),
        lengths=lengths,
        starts=(ends - lengths) - (ends - lengths)[first][part_of],
        part_of=part_of,
        parts=[SimpleNamespace(manifest=manifest) for manifest in manifests],
        spec=SimpleNamespace(hidden_size=4096, layer_ids=tuple(range(5))),
    )


class Numbers:
    """A loader's rows, known by number alone."""

    def __init__(self, loader: RowLoader) -> None:
        self.rows_per_epoch, self.tokens_per_row = loader.rows_per_epoch, loader.tokens_per_row

    def epoch(self, epoch: int, start_row: int = 0, rows: Sequence[int] | None = None) -> Iterator[Any]:
        return iter(range(start_row, self.rows_per_epoch(epoch)) if rows is None else rows)


def decoded(loader: RowLoader, reader: Any, processes: int) -> float:
    """Over chunks there, of an epoch in steps of a row for each process."""
    tasks, (pools, plan), optim = 0, loader._planned(0), OptimConfig(epochs=1.0, accumulate_rows=processes)
    for rank in range(processes):
        mine = [row for step in work(Numbers(loader), Position(), optim, rank, processes) for _, row in step.mine]
        places = {"cache": loader._cache_of, "part": loader._parts, "start": loader._starts, "length": loader._lengths}
        scatter = Scatter(plan.only(mine), loader._row_tokens, **places, chunk_tokens=loader._chunks)
        tasks += sum(len(scatter.tasks(pool, 0)) for pool in pools)
    return tasks / sum(part.manifest.num_chunks for part in reader.parts)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row-tokens", type=int, default=8192, help="(default: %(default)s)")
    parser.add_argument("--length", type=int, default=400, help="mean tokens of a sample (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=6_000_000, help="of the cache (default: %(default)s)")
    options = parser.parse_args()
    reader = index(options.tokens, options.length)
    print(f"{'':10} {'padding':>8} " + " ".join(f"{n:>3} process{'es' if n > 1 else '  '}" for n in (1, 2, 4, 8)))
    for lanes in (1, 2, 4, 8, 16):
        loader = RowLoader([reader], layer_ids=None, row_tokens=options.row_tokens, need_verifier=True, seed=0, lanes=lanes)
        padding = 1 - loader._lengths.clip(max=options.row_tokens).sum() / (options.row_tokens * loader.rows_per_epoch(0))
        print(f"{lanes:3} lanes  {padding:8.3f} " + " ".join(f"{decoded(loader, reader, n):13.3f}" for n in (1, 2, 4, 8)))
        loader.close()


if __name__ == "__main__":
    main()
