"""Packing: choose which samples share a row of T tokens.

In: lengths in the order of the epoch. Out: rows as lists of samples. A greedy plan over a few open rows, so that a sample
is placed soon after it is read and little of a row stays empty. Owns the plan only; reads no states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

OPEN_ROWS = 16
"""Rows that may be partly filled at once; more fill better and hold samples longer."""


@dataclass(frozen=True)
class RowPlan:
    """R rows."""

    samples: np.ndarray
    """int64: the samples of row r are samples[starts[r]:starts[r + 1]]."""
    starts: np.ndarray
    """int64 [R + 1]."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, number: int) -> np.ndarray:
        """The samples of one row, in their order."""
        return self.samples[self.starts[number] : self.starts[number + 1]]

    def only(self, rows: Sequence[int]) -> RowPlan:
        """The plan of these rows alone, numbered anew."""
        members = [self.row(number) for number in rows]
        ends = np.cumsum([0, *map(len, members)]).astype(np.int64)
        return RowPlan(np.concatenate([np.empty(0, np.int64), *members]), ends)


def pack(samples: np.ndarray, lengths: np.ndarray, row_tokens: int, open_rows: int = OPEN_ROWS) -> RowPlan:
    """Place each sample, in order, into the fullest open row that still has room; close the fullest when too many are open.

    samples: int64, the epoch's order. lengths: int64, tokens of each sample by its number. A sample longer than a row takes
    a row alone and is cut to it.  Best-fit bin packing; see "Fewer Truncations Improve Language Modeling", arXiv 2404.10830.
    """
    rows: list[list[int]] = []
    partly: list[tuple[int, list[int]]] = []  # (tokens left, samples), fewest left first
    for sample, length in zip(samples.tolist(), np.minimum(lengths[samples], row_tokens).tolist()):
        for at, (room, _) in enumerate(partly):
            if room >= length:
                left, members = partly.pop(at)
                break
        else:
            left, members = row_tokens, []
        members.append(sample)
        left -= length
        if left == 0:
            rows.append(members)
            continue
        position = next((at for at, (other, _) in enumerate(partly) if other >= left), len(partly))
        partly.insert(position, (left, members))
        if len(partly) > open_rows:
            rows.append(partly.pop(0)[1])
    rows.extend(members for _, members in partly)
    counts = [len(row) for row in rows]
    return RowPlan(np.array([s for row in rows for s in row], np.int64), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
