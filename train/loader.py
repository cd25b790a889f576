"""RowLoader: packed rows as Batches, in a seeded order, read ahead by threads.

In: readers, the windows' order and the packing plan. Out: Batches on the CPU. A row depends only on (seed, epoch) and its
number, so a resumed run repeats exactly, and processes may share an epoch's rows as they like. Knows nothing of the model.

Each chunk is decoded once a pool of windows and its rows go straight to their places in the rows of tokens that hold them;
nothing decoded is kept elsewhere. The memory of a row is used again when its Batch is gone.
"""

from __future__ import annotations

import heapq
import itertools
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ..common import layout
from ..common.layers import layer_slots
from .batch import PADDING, Batch
from .lanes import deal, interleave, order
from .packer import OPEN_ROWS, RowPlan, pack, row_sizes
from .page_locked import Allocate, ordinary
from .reader import CacheReader
from .scatter import ChunkTask, Scatter
from .teacher_targets import TeacherTargets
from .window import cut_windows, epoch_pools

WINDOW_CHUNKS = 16
"""Chunks in a window. A chunk that two windows share is decoded for each, so 16 costs at most 1/16 twice."""
POOL_WINDOWS = 4
"""Windows whose samples are shuffled among each other."""
BUFFER_BYTES = 4 << 30
"""Memory for rows being filled or waiting, about. Smaller windows and pools are taken where these would not fit."""
MAX_THREADS = 8
"""Decoding threads; one gives about a gigabyte of states a second."""


class RowLoader:
    """Packed rows of several caches of one target.

    layer_ids: the drafter's layers, None for all stored. row_tokens: T of every batch. need_verifier: read the verifier
    states too. numbers: of each reader, the cache's number in `sample_ids`; None: 0, 1, ... chosen: of an epoch, which samples
    are read, bool [samples of all readers]; None: all. teacher: of each reader, the teacher's tokens kept in its cache; None: not
    read. lanes: runs of rows that share no pool and take turns; each has a buffer of its own. allocate: makes the memory of rows,
    uint16 of a shape. threads: that decode, at most as many as cores. Raises InputError when a cache lacks a layer; CacheDamaged
    when reading finds damage.
    """

    def __init__(
        self,
        readers: Sequence[CacheReader],
        *,
        layer_ids: tuple[int, ...] | None,
        row_tokens: int,
        need_verifier: bool,
        seed: int,
        shuffle: bool = True,
        numbers: Sequence[int] | None = None,
        chosen: Callable[[int], np.ndarray] | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        teacher: Sequence[TeacherTargets] | None = None,
        lanes: int = 1,
        allocate: Allocate = ordinary,
        threads: int = MAX_THREADS,
    ) -> None:
        self._readers = list(readers)
        self._slots = [layer_slots(layer_ids, reader.spec.layer_ids, str(reader.path)) for reader in self._readers]
        self._need_verifier = need_verifier
        self._row_tokens = row_tokens
        self._seed, self._shuffle, self._chosen = seed, shuffle, chosen
        self._lanes = lanes
        self._teacher = tuple(teacher) if teacher is not None else None
        self._numbers = tuple(numbers) if numbers is not None else tuple(range(len(self._readers)))
        counts = [reader.num_samples for reader in self._readers]
        self._first_sample = np.concatenate([[0], np.cumsum(counts)])
        self._cache_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._lengths = np.concatenate([reader.lengths for reader in self._readers])
        self._starts = np.concatenate([reader.starts for reader in self._readers])
        self._parts = np.concatenate([reader.part_of for reader in self._readers])
        self._chunks = np.concatenate([np.array([part.manifest.chunk_tokens for part in reader.parts])[reader.part_of] for reader in self._readers])
        chunk = int(self._chunks.max())
        width, layers = self._readers[0].spec.hidden_size, len(self._slots[0])
        self._shapes = ((row_tokens, layers, width), (row_tokens, width) if need_verifier else None)
        row_bytes = row_tokens * (layers + 1) * width * 2
        share = max(1, buffer_bytes // (3 * row_bytes))  # a third each: rows ahead, the pool, rows that are still open
        self._ahead, self._open_rows = share, min(share, OPEN_ROWS)
        window_chunks = min(max(share * row_tokens // chunk, 1), WINDOW_CHUNKS)
        self._pool_windows = min(max(share * row_tokens // (chunk * window_chunks), 1), POOL_WINDOWS)
        self._windows = cut_windows(self._cache_of, self._parts, self._starts, chunk * window_chunks)
        self._plans: dict[int, tuple[list[np.ndarray], RowPlan]] = {}
        self._tokens: dict[int, np.ndarray] = {}
        self._threads = ThreadPoolExecutor(min(threads, len(os.sched_getaffinity(0))), thread_name_prefix="dflash-read")
        self._memory = _Memory(allocate)

    def rows_per_epoch(self, epoch: int) -> int:
        """Rows of an epoch."""
        return len(self._row_sizes(epoch))

    def tokens_per_row(self, epoch: int) -> list[int]:
        """Tokens of each row of an epoch, padding aside."""
        sizes: list[int] = self._row_sizes(epoch).tolist()
        return sizes

    def epoch(self, epoch: int, start_row: int = 0, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """The rows of `epoch` from number `start_row` on, or those numbered `rows` (ascending); no chunk is read for others."""
        pools, plan = self._planned(epoch)
        return self._read(plan, pools, start_row) if rows is None else self._read(plan.only(rows), pools, 0)

    def close(self) -> None:
        """Stop reading ahead."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _pools(self, epoch: int) -> list[np.ndarray]:
        return epoch_pools(self._windows, seed=self._seed, epoch=epoch, pool_windows=self._pool_windows, shuffle=self._shuffle)

    def _planned(self, epoch: int) -> tuple[list[np.ndarray], RowPlan]:
        """The pools of an epoch and its rows; of the last few epochs that were asked for."""
        if epoch not in self._plans:
            if len(self._plans) > 1:
                self._plans.clear()
            pools = self._pools(epoch)
            plan = interleave([pack(lane, self._lengths, self._row_tokens, self._open_rows) for lane in self._dealt(epoch, pools)])
            self._plans[epoch] = pools, plan
        return self._plans[epoch]

    def _row_sizes(self, epoch: int) -> np.ndarray:
        """int32: tokens of each row. The plan itself is made only of the first epoch, which most runs read next: others are counted."""
        if epoch not in self._tokens:
            if epoch == 0 or epoch in self._plans:
                plan = self._planned(epoch)[1]
                ends = np.concatenate([[0], np.cumsum(np.minimum(self._lengths[plan.samples], self._row_tokens))])[plan.starts]
                self._tokens[epoch] = np.diff(ends).astype(np.int32)
            else:
                sizes = [row_sizes(lane, self._lengths, self._row_tokens, self._open_rows) for lane in self._dealt(epoch, self._pools(epoch))]
                self._tokens[epoch] = np.concatenate(sizes)[order([len(lane) for lane in sizes])].astype(np.int32)
        return self._tokens[epoch]

    def _dealt(self, epoch: int, pools: list[np.ndarray]) -> list[np.ndarray]:
        """The samples that an epoch reads, lane by lane."""
        chosen = self._chosen(epoch) if self._chosen is not None else None
        if chosen is not None and not chosen.all():
            pools = [pool[chosen[pool]] for pool in pools]
        return deal(pools, self._lengths, self._lanes)

    def _read(self, plan: RowPlan, pools: list[np.ndarray], start_row: int) -> Iterator[Batch]:
        """Rows in order. A chunk's task starts when the first row that needs it is near; rows it needs later are begun too."""
        scatter = Scatter(
            plan, self._row_tokens, cache=self._cache_of, part=self._parts, start=self._starts, length=self._lengths, chunk_tokens=self._chunks
        )
        pool_of = np.zeros(len(self._lengths), np.int64)
        for pool, samples in enumerate(pools):
            pool_of[samples] = pool
        rows: dict[int, _Row] = {}
        waiting: list[tuple[int, int, ChunkTask]] = []  # a heap, by the first row that needs it
        tie = itertools.count()
        met: set[int] = set()
        near = start_row
        for number in range(start_row, len(plan)):
            while near < min(number + 1 + self._ahead, len(plan)):
                for pool in np.unique(pool_of[plan.row(near)]).tolist():
                    if pool not in met:
                        met.add(pool)
                        for task in scatter.tasks(pools[pool], start_row):
                            heapq.heappush(waiting, (task.first_row, next(tie), task))
                near += 1
            while waiting and waiting[0][0] < near:
                task = heapq.heappop(waiting)[2]
                for placement in task.placements:
                    if placement.row not in rows:
                        rows[placement.row] = _Row(self._shapes, self._memory)
                targets = {placement.row: rows[placement.row] for placement in task.placements}
                future = self._threads.submit(self._fill, task, targets)
                for row in targets.values():
                    row.pending.append(future)
            row = rows.pop(number)
            for future in row.pending:
                future.result()
            yield self._batch(plan.row(number), row)

    def _fill(self, task: ChunkTask, rows: dict[int, _Row]) -> None:
        """Decode a chunk and put its rows where they belong. Holds `rows`, so that their memory is not given away meanwhile."""
        reader = self._readers[task.cache]
        places = [(p.first, rows[p.row], slice(p.at, p.at + p.count)) for p in task.placements]
        for index, slot in enumerate(self._slots[task.cache]):
            pieces = [(first, row.features[here, index]) for first, row, here in places]
            reader.fill(task.part, task.chunk, layout.HIDDEN_STATES, slot, pieces)
        if self._need_verifier:
            reader.fill(task.part, task.chunk, layout.VERIFIER, 0, [(first, row.verifier[here]) for first, row, here in places])

    def _batch(self, samples: np.ndarray, row: _Row) -> Batch:
        tokens = self._row_tokens
        ids, following = np.zeros(tokens, np.int64), np.full(tokens, -1, np.int64)
        document, position = np.full(tokens, PADDING, np.int32), np.zeros(tokens, np.int32)
        mask, following_mask = np.zeros(tokens, bool), np.zeros(tokens, bool)
        teacher = np.full(tokens, -1, np.int32) if self._teacher is not None else None
        sample_ids, sources, at = [], [], 0
        for number, sample in enumerate(samples.tolist()):
            cache = int(self._cache_of[sample])
            reader, local = self._readers[cache], int(sample - self._first_sample[cache])
            length = min(int(self._lengths[sample]), tokens)
            here = slice(at, at + length)
            sample_tokens, sample_mask = reader.tokens(local, "input_ids"), reader.tokens(local, "loss_mask")
            ids[here], mask[here] = sample_tokens[:length], sample_mask[:length]
            after = reader.next_token(local)
            following[here] = np.append(sample_tokens, after)[1 : length + 1]
            following_mask[here] = np.append(sample_mask, after >= 0)[1 : length + 1]
            document[here], position[here] = number, np.arange(length)
            if teacher is not None and self._teacher is not None:
                teacher[here] = self._teacher[cache].sample(local)[:length]
            sample_ids.append((self._numbers[cache], local))
            sources.append(reader.source(local))
            at += length
        return Batch(
            input_ids_T=torch.from_numpy(ids),
            document_T=torch.from_numpy(document),
            position_T=torch.from_numpy(position),
            loss_mask_T=torch.from_numpy(mask),
            next_ids_T=torch.from_numpy(following),
            next_supervised_T=torch.from_numpy(following_mask),
            features=row.tensor(row.features, at),
            verifier=row.tensor(row.verifier, at) if self._need_verifier else None,
            sample_ids=tuple(sample_ids),
            sources=tuple(sources),
            teacher_T=torch.from_numpy(teacher) if teacher is not None else None,
        )


class _Row:
    """The states of one packed row while they are put together, and the tasks that still work on them."""

    def __init__(self, shapes: tuple[tuple[int, ...], tuple[int, ...] | None], memory: _Memory) -> None:
        self.features = memory.lend(shapes[0])
        """uint16 [T, K, H]."""
        self.verifier = memory.lend(shapes[1] or (0, 0))
        """uint16 [T, H]."""
        self.pending: list[Future[None]] = []

    def tensor(self, bits: np.ndarray, used: int) -> torch.Tensor:
        """bfloat16, zero behind the first `used` positions."""
        bits[used:] = 0
        return torch.from_numpy(bits).view(torch.bfloat16)


class _Memory:
    """Arrays that are used again and again. Threads may share it."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self.free: dict[tuple[int, ...], list[np.ndarray]] = defaultdict(list)

    def lend(self, shape: tuple[int, ...]) -> np.ndarray:
        """uint16 of `shape`, undefined. It is free again when the last tensor or view made of it is gone."""
        kept = self.free[shape]
        try:
            owner = kept.pop()
        except IndexError:
            owner = self._allocate(shape)
        lent = owner.view()
        weakref.finalize(lent, kept.append, owner).atexit = False
        return lent
