"""Work: an epoch's rows cut into optimizer steps, and a step's rows dealt to the processes.

In: a loader of rows, where to start, and how large a step is. Out: for each step its rows, of which this process reads its
own. A row's place in its step decides what is drawn for it, so that every number of processes takes the same steps over the
same rows: each once an epoch, in one order. Its number decides who reads it: of consecutive rows each process reads one in turn,
which with lanes (`lanes.py`) leaves a process the same lanes throughout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..common.errors import RunFailed
from .batch import Batch
from .config import OptimConfig


class Rows(Protocol):
    """What training needs of a loader."""

    def rows_per_epoch(self, epoch: int) -> int:
        """Rows of an epoch."""
        ...

    def tokens_per_row(self, epoch: int) -> Sequence[int]:
        """Tokens of each row of an epoch, padding aside. Asked for only where steps are cut by tokens."""
        ...

    def epoch(self, epoch: int, start_row: int = 0, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """The rows of an epoch from `start_row` on, or those numbered `rows` (ascending)."""
        ...


@dataclass(frozen=True)
class Position:
    """The next row to read."""

    epoch: int = 0
    row: int = 0


@dataclass(frozen=True)
class StepWork:
    """One optimizer step."""

    rows: int
    """Rows of the step, over all processes."""
    mine: Iterator[tuple[int, Batch]]
    """Of them, this process's: (place in the step, row). To be read to its end before the next step is asked for."""
    after: Position
    """Where the next step begins."""


def work(rows: Rows, start: Position, config: OptimConfig, rank: int = 0, size: int = 1) -> Iterator[StepWork]:
    """Steps from `start` on, for process `rank` of `size`: to the end of the last epoch, or without end when `steps` is given.

    A step that an epoch's end leaves unfilled takes its other rows from the next epoch; only the run's last step may be
    smaller. Raises RunFailed when there are no rows.
    """
    end = None if config.steps is not None else _end(rows, config)
    members: list[tuple[int, Iterator[Batch] | None]] = []  # of the step being filled; where to read the row, if it is ours
    filled, begun = 0, start.row
    for epoch in itertools.count(start.epoch):
        first, count = start.row if epoch == start.epoch else 0, rows.rows_per_epoch(epoch)
        if not count:
            raise RunFailed("the caches give no rows", place=f"epoch {epoch}")
        places, closes = _cut(_costs(rows, epoch, config, first, count), _limit(config), len(members), filled)
        if not members:
            begun = first
        readers = []  # by a row's number within its epoch; a step over the border goes on counting, so that all read as much of it
        for row, place, (is_full, _) in zip(range(first, count), places, closes):
            readers.append((begun + place) % size)
            begun = row + 1 if is_full else begun
        mine = [first + at for at, reader in enumerate(readers) if reader == rank]
        source = rows.epoch(epoch, first) if size == 1 else rows.epoch(epoch, rows=mine)
        for row, reader, (is_full, held) in zip(range(first, count), readers, closes):
            members.append((len(members), source if reader == rank else None))
            after, filled = Position(epoch, row + 1), held
            if is_full or after == end:
                yield StepWork(len(members), ((at, next(where)) for at, where in members if where is not None), after)
                members = []
            if after == end:
                return


def total_steps(config: OptimConfig, rows: Rows) -> int:
    """Optimizer steps of the run: as configured, or what `epochs` gives; the last may be smaller. Reads no row."""
    if config.steps is not None:
        return config.steps
    end, steps, held, filled = _end(rows, config), 0, 0, 0
    for epoch in range(end.epoch + 1):
        count = end.row if epoch == end.epoch else rows.rows_per_epoch(epoch)
        places, closes = _cut(_costs(rows, epoch, config, 0, count), _limit(config), held, filled)
        steps += sum(is_full for is_full, _ in closes)
        if places:
            held, filled = (0, 0) if closes[-1][0] else (places[-1] + 1, closes[-1][1])
    return max(steps + bool(held), 1)


def _end(rows: Rows, config: OptimConfig) -> Position:
    """Where a run of `epochs` stops: after the last row of the last epoch, or of the part of it that is asked for."""
    whole = math.floor(config.epochs)
    part = math.ceil((config.epochs - whole) * rows.rows_per_epoch(whole)) if config.epochs > whole else 0
    return Position(whole, part) if part else Position(whole - 1, rows.rows_per_epoch(whole - 1))


def _limit(config: OptimConfig) -> int:
    return config.accumulate_tokens or config.accumulate_rows or 1


def _costs(rows: Rows, epoch: int, config: OptimConfig, first: int, stop: int) -> Sequence[int]:
    """What each row adds to a step: 1, or its tokens."""
    return list(rows.tokens_per_row(epoch)[first:stop]) if config.accumulate_tokens else [1] * (stop - first)


def _cut(costs: Sequence[int], limit: int, held: int, filled: int) -> tuple[list[int], list[tuple[bool, int]]]:
    """For each row its place in its step, and (does it fill the step, what the open step then holds).

    The first rows join a step that holds `held` rows of cost `filled` already.
    """
    places, closes = [], []
    for cost in costs:
        places.append(held)
        held, filled = held + 1, filled + int(cost)
        is_full = filled >= limit
        if is_full:
            held, filled = 0, 0
        closes.append((is_full, filled))
    return places, closes
