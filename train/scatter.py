"""Where decoded rows go: for samples with a place in packed rows, which rows of which chunk belong where.

In: samples of a pool and the packing plan. Out: one task a chunk, so that a chunk is decoded once and each of its rows is
put straight into the packed row that holds it. Pure; reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .packer import RowPlan


@dataclass(frozen=True)
class Placement:
    """Rows of a chunk that stand together in a packed row."""

    row: int
    """Number of the packed row."""
    at: int
    """Their first position there."""
    first: int
    """Their first row within the chunk."""
    count: int


@dataclass(frozen=True)
class ChunkTask:
    """All that is wanted of one chunk."""

    cache: int
    part: int
    chunk: int
    placements: tuple[Placement, ...]
    """By packed row, ascending."""

    @property
    def first_row(self) -> int:
        """The first packed row that needs it."""
        return self.placements[0].row


class Scatter:
    """The tasks of a plan, pool by pool.

    cache, part, start, length: of every sample S (all int, [S]); start counts rows within its part. chunk_tokens: of every
    sample's part [S]. A sample longer than a row is cut to it, as in `pack`.
    """

    def __init__(
        self, plan: RowPlan, row_tokens: int, *, cache: np.ndarray, part: np.ndarray, start: np.ndarray, length: np.ndarray, chunk_tokens: np.ndarray
    ) -> None:
        self._cache, self._part, self._start, self._chunk = cache, part, start, chunk_tokens
        self._length = np.minimum(length, row_tokens)
        sizes = self._length[plan.samples]
        ends = np.cumsum(sizes)
        row = np.repeat(np.arange(len(plan), dtype=np.int64), np.diff(plan.starts))
        before_row = np.concatenate([[0], ends])[plan.starts[:-1]]
        self._row, self._at = np.full(len(length), -1, np.int64), np.zeros(len(length), np.int64)
        self._row[plan.samples] = row
        self._at[plan.samples] = ends - sizes - before_row[row]

    def tasks(self, samples: np.ndarray, start_row: int) -> list[ChunkTask]:
        """What `samples` (int64, one pool) need, packed rows before `start_row` left out; in the order of first use."""
        samples = samples[self._row[samples] >= start_row]
        if not len(samples):
            return []
        size, start, length = self._chunk[samples], self._start[samples], self._length[samples]
        first_chunk = start // size
        counts = (start + length - 1) // size - first_chunk + 1  # chunks that a sample touches
        whose = np.repeat(np.arange(len(samples)), counts)
        chunk = first_chunk[whose] + np.arange(len(whose)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin = np.maximum(start[whose], chunk * size[whose])  # rows within the part
        end = np.minimum((start + length)[whose], (chunk + 1) * size[whose])
        cache, part, row = self._cache[samples][whose], self._part[samples][whose], self._row[samples][whose]
        at = self._at[samples][whose] + begin - start[whose]
        order = np.lexsort((at, row, chunk, part, cache))
        table = np.stack([cache, part, chunk, row, at, begin - chunk * size[whose], end - begin], 1)[order]
        borders = np.flatnonzero((np.diff(table[:, :3], axis=0) != 0).any(1)) + 1
        tasks = [
            ChunkTask(int(group[0, 0]), int(group[0, 1]), int(group[0, 2]), tuple(Placement(*placement) for placement in group[:, 3:].tolist()))
            for group in np.split(table, borders)
        ]
        return sorted(tasks, key=lambda task: task.first_row)
