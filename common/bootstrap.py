"""Confidence intervals by the bootstrap: how far a number would move had other documents of the same kind been drawn.

In: for each document what it adds to a numerator and to a denominator. Out: the interval of the ratio of the two sums, from
resampling whole documents (tokens of one document are not independent). Seeded; pure numpy, no loop over resamples.
"""

from __future__ import annotations

import numpy as np

LEVEL = 0.95
BLOCK_NUMBERS = 1 << 22
"""Draws made at once; bounds memory."""

Interval = tuple[float, float]


def intervals(above_DM: np.ndarray, below_DM: np.ndarray, *, resamples: int, seed: int, offset: float = 0.0) -> list[Interval | None]:
    """The percentile interval of offset + sum(above) / sum(below) for each of M ratios over D documents.

    None where it is not known: fewer than two documents have a denominator, or `resamples` is 0. Resamples in which a
    denominator is 0 are left out.
    """
    documents, ratios = above_DM.shape
    if not resamples or documents < 2:
        return [None] * ratios
    draws = np.random.default_rng(seed)
    values_DX, found = np.concatenate([above_DM, below_DM], 1).astype(np.float64), []
    at_once = max(1, BLOCK_NUMBERS // documents)
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        drawn_RD = draws.integers(0, documents, (rows, documents)) + np.arange(rows)[:, None] * documents
        times_RD = np.bincount(drawn_RD.ravel(), minlength=rows * documents).reshape(rows, documents)
        found.append(times_RD @ values_DX)
    sums_RX = np.concatenate(found)
    above_RM, below_RM = sums_RX[:, :ratios], sums_RX[:, ratios:]
    edges = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    results: list[Interval | None] = []
    for ratio in range(ratios):
        usable = below_RM[:, ratio] > 0
        if np.count_nonzero(below_DM[:, ratio]) < 2 or not usable.any():
            results.append(None)
            continue
        low, high = np.quantile(above_RM[usable, ratio] / below_RM[usable, ratio], edges)
        results.append((offset + float(low), offset + float(high)))
    return results
