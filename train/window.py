"""Windows: runs of consecutive samples that share chunks, and the seeded order in which an epoch visits them.

In: where each sample lies. Out: windows, and a permutation of samples in which each window is needed only for a short
while, so that each chunk is decoded about once an epoch whatever the lengths. Pure; reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Windows:
    """W windows over S samples of one or more caches."""

    cache: np.ndarray
    """int32 [W]: number of the cache."""
    first: np.ndarray
    """int64 [W]: its first sample (numbered over all caches)."""
    stop: np.ndarray
    """int64 [W]: one past its last sample."""
    window_of: np.ndarray
    """int32 [S]: the window of each sample."""


def cut_windows(cache_S: np.ndarray, part_S: np.ndarray, start_S: np.ndarray, window_tokens: int) -> Windows:
    """Cut samples, which stand in storage order, into windows of about `window_tokens` rows; none crosses a part.

    A sample belongs to the window in which its first row lies. window_tokens should be a multiple of the chunk.
    """
    cells = (cache_S, part_S, start_S // window_tokens)
    changes = np.flatnonzero(np.logical_or.reduce([cell[1:] != cell[:-1] for cell in cells])) + 1
    first = np.concatenate([[0], changes]).astype(np.int64)
    stop = np.concatenate([changes, [len(start_S)]]).astype(np.int64)
    window_of = np.repeat(np.arange(len(first), dtype=np.int32), stop - first)
    return Windows(cache_S[first].astype(np.int32), first, stop, window_of)


def epoch_pools(windows: Windows, *, seed: int, epoch: int, pool_windows: int, shuffle: bool) -> list[np.ndarray]:
    """The samples of `epoch` in their order, pool by pool: int64 each.

    Windows are shuffled and taken in pools of `pool_windows`; the samples within a pool are shuffled. Depends on nothing but
    the arguments. Without shuffle: storage order.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(windows.first)) if shuffle else np.arange(len(windows.first))
    pools = []
    for begin in range(0, len(order), pool_windows):
        pool = np.concatenate([np.arange(windows.first[w], windows.stop[w]) for w in order[begin : begin + pool_windows]])
        pools.append(np.random.default_rng((seed, epoch, 0, begin)).permutation(pool) if shuffle else pool)
    return pools
