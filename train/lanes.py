"""Lanes: an epoch's pools dealt to several runs of rows that share no pool, and those runs put back into one order of rows.

In: pools of samples, and how many lanes. Out: each lane's samples; the rows of all lanes in one plan, row n of lane n mod lanes.
Processes that take every so-many-eth row then decode chunks of their own. The number of lanes belongs to the run, not to the
number of processes, so that any number of them takes the same rows. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .packer import RowPlan


def deal(pools: Sequence[np.ndarray], lengths: np.ndarray, lanes: int) -> list[np.ndarray]:
    """The samples of each lane, int64, in order: every pool goes to the lane that holds the fewest tokens so far."""
    if lanes == 1:
        return [np.concatenate([np.empty(0, np.int64), *pools])]
    members: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in range(lanes)]
    tokens = [0] * lanes
    for pool in pools:
        lane = tokens.index(min(tokens))
        members[lane].append(pool)
        tokens[lane] += int(lengths[pool].sum())
    return [np.concatenate(lane) for lane in members]


def order(rows: Sequence[int]) -> np.ndarray:
    """int64: where the rows of all lanes, lane after lane, stand in the common order, by turns. rows: of each lane.

    Where a lane has fewer rows than others, its turns are left out at the end.
    """
    lane = np.repeat(np.arange(len(rows)), rows)
    turn = np.concatenate([np.arange(count) for count in rows]) if len(rows) else lane
    return np.lexsort((lane, turn))


def interleave(plans: Sequence[RowPlan]) -> RowPlan:
    """One plan with the rows of all lanes by turns."""
    if len(plans) == 1:
        return plans[0]
    sizes, samples = np.concatenate([np.diff(plan.starts) for plan in plans]), np.concatenate([plan.samples for plan in plans])
    taken = order([len(plan) for plan in plans])
    starts = np.concatenate([[0], np.cumsum(sizes[taken])]).astype(np.int64)
    first = (np.cumsum(sizes) - sizes)[taken]
    here = np.arange(len(samples)) - np.repeat(starts[:-1], sizes[taken]) + np.repeat(first, sizes[taken])
    return RowPlan(samples[here], starts)
