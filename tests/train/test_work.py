"""Steps over an epoch's rows: each row once, in one order, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch

from dflash_cache.common.errors import RunFailed
from dflash_cache.train.config import OptimConfig
from dflash_cache.train.work import Position, total_steps, work

START = Position()


class Numbers:
    """Rows that are no more than (epoch, number); `tokens` of each row of an epoch."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def rows_per_epoch(self, epoch: int) -> int:
        return len(self.tokens)

    def tokens_per_row(self, epoch: int) -> Sequence[int]:
        return self.tokens

    def epoch(self, epoch: int, start_row: int = 0, rows: Sequence[int] | None = None) -> Iterator[Any]:
        return iter([(epoch, row) for row in (range(start_row, len(self.tokens)) if rows is None else rows)])


def config(**values: Any) -> OptimConfig:
    return OptimConfig.model_validate({"steps": None, "epochs": 1.0, **values})


def read(rows: Numbers, of: OptimConfig, start: Position = START, size: int = 1) -> list[list[Any]]:
    """The rows of each step, put together from all processes."""
    steps = []
    for parts in zip(*(work(rows, start, of, rank, size) for rank in range(size)), strict=True):  # type: ignore[arg-type]
        assert len({(part.rows, part.after) for part in parts}) == 1
        placed = sorted(item for part in parts for item in part.mine)
        assert [place for place, _ in placed] == list(range(parts[0].rows))
        steps.append([row for _, row in placed])
    return steps


def test_steps_of_so_many_rows_go_on_over_the_end_of_an_epoch_and_the_last_may_be_smaller():
    found = read(Numbers([1] * 5), config(epochs=2.0, accumulate_rows=4))
    assert found == [[(0, 0), (0, 1), (0, 2), (0, 3)], [(0, 4), (1, 0), (1, 1), (1, 2)], [(1, 3), (1, 4)]]


def test_steps_of_so_many_tokens_are_closed_by_the_row_that_fills_them():
    rows = Numbers([10, 10, 3, 20, 7])
    assert read(rows, config(accumulate_tokens=20)) == [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4)]]
    whole = read(rows, config(epochs=2.0, accumulate_tokens=20))
    assert whole[2:] == [[(0, 4), (1, 0), (1, 1)], [(1, 2), (1, 3)], [(1, 4)]]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("step", [{"accumulate_rows": 3}, {"accumulate_rows": 1}, {"accumulate_tokens": 17}])
def test_any_number_of_processes_takes_the_same_steps_over_the_same_rows(size: int, step: dict[str, int]):
    rows, of = Numbers([9, 5, 17, 2, 8, 8, 1]), config(epochs=2.5, **step)
    torch.manual_seed(size)  # nothing outside decides
    assert read(rows, of, size=size) == read(rows, of)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("step", [{"accumulate_rows": 2}, {"accumulate_tokens": 17}])
def test_going_on_after_any_step_gives_the_steps_that_were_left(size: int, step: dict[str, int]):
    """Wherever the first life ended: inside an epoch, at its end, or after the last step."""
    rows, of = Numbers([9, 5, 17, 2, 8, 8]), config(epochs=2.0, **step)
    steps = list(work(rows, Position(), of))
    whole = read(rows, of)
    for number, part in enumerate(steps[:-1], 1):
        assert read(rows, of, part.after, size) == whole[number:]


def test_the_count_of_steps_is_the_number_of_steps():
    for epochs in (0.3, 1.0, 1.5, 2.0, 3.7):
        for step in ({"accumulate_rows": 1}, {"accumulate_rows": 4}, {"accumulate_tokens": 17}, {"accumulate_tokens": 1000}):
            rows, of = Numbers([9, 5, 17, 2, 8]), config(epochs=epochs, **step)
            assert total_steps(of, rows) == len(read(rows, of))  # type: ignore[arg-type]
    assert total_steps(config(epochs=6.0), Numbers([1] * 5)) == 30  # type: ignore[arg-type]
    assert total_steps(config(steps=7), Numbers([1] * 5)) == 7  # type: ignore[arg-type]


def test_more_steps_than_an_epoch_holds_begin_another_epoch_and_never_repeat_a_row_within_one():
    """100 steps over 10 rows."""
    steps = islice(work(Numbers([1] * 10), Position(), config(steps=100)), 100)  # type: ignore[arg-type]
    rows = [row for step in steps for _, row in step.mine]
    assert rows == [(epoch, row) for epoch in range(10) for row in range(10)]


def test_a_fraction_of_an_epoch_reads_that_share_of_it():
    assert read(Numbers([1] * 5), config(epochs=0.5)) == [[(0, 0)], [(0, 1)], [(0, 2)]]


def test_caches_without_rows_end_the_run():
    with pytest.raises(RunFailed, match="no rows"):
        next(work(Numbers([]), Position(), config(steps=1)))  # type: ignore[arg-type]
