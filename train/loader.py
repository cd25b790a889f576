"""RowLoader: packed rows as Batches, in a seeded order, read ahead in a thread.

In: readers, the windows' order and the packing plan. Out: Batches on the CPU. A row depends only on (seed, epoch, rank,
world size) and its number, so a resumed run repeats exactly. Knows nothing of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ..common import layout
from ..common.errors import InputError
from ..common.layers import layer_slots
from .batch import PADDING, Batch, Planes
from .packer import RowPlan, pack
from .reader import CacheReader, Rows
from .window import cut_windows, epoch_order

WINDOW_CHUNKS = 16
"""Chunks in a window. One more is decoded per window than it holds, so 16 costs at most 1/16 twice."""
POOL_WINDOWS = 4
"""Windows whose samples are shuffled among each other; also what is kept decoded in memory."""
READ_AHEAD = 2
"""Windows being decoded while the trainer works."""


class RowLoader:
    """Packed rows of several caches of one target.

    layer_ids: the drafter's layers, None for all stored. row_tokens: T of every batch. need_verifier: read the verifier
    states too. Raises InputError when a cache lacks a layer; CacheDamaged when reading finds damage.
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
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._readers = list(readers)
        self._slots = [layer_slots(layer_ids, reader.spec.layer_ids, str(reader.path)) for reader in self._readers]
        bits = {str(reader.path): reader.spec.mantissa_bits for reader in self._readers}
        if len(set(bits.values())) > 1:
            raise InputError(
                "caches that are trained on together must keep the same mantissa bits", place="--cache", found=bits, fix="train on those of one kind"
            )
        self._row_tokens, self._need_verifier = row_tokens, need_verifier
        self._seed, self._shuffle, self._rank, self._world_size = seed, shuffle, rank, world_size
        counts = [reader.num_samples for reader in self._readers]
        self._first_sample = np.concatenate([[0], np.cumsum(counts)])
        self._cache_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._lengths = np.concatenate([reader.lengths for reader in self._readers])
        self._starts = np.concatenate([reader.starts for reader in self._readers])
        self._parts = np.concatenate([reader.part_of for reader in self._readers])
        chunk = max(part.manifest.chunk_tokens for reader in self._readers for part in reader.parts)
        self._windows = cut_windows(self._cache_of, self._parts, self._starts, chunk * WINDOW_CHUNKS)
        self._plans: dict[tuple[int, int], RowPlan] = {}
        self._threads = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="dflash-read")

    def rows_per_epoch(self, epoch: int) -> int:
        """Rows of an epoch, the same on every rank: ranks with fewer samples end on empty rows."""
        return max(len(self._plan(epoch, rank)) for rank in range(self._world_size))

    def epoch(self, epoch: int, start_row: int = 0) -> Iterator[Batch]:
        """This rank's rows of `epoch` from number `start_row` on."""
        plan = self._plan(epoch, self._rank)
        yield from self._read(plan, start_row)
        for _ in range(max(start_row, len(plan)), self.rows_per_epoch(epoch)):
            yield self._build([])

    def close(self) -> None:
        """Stop reading ahead."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _plan(self, epoch: int, rank: int) -> RowPlan:
        key = (epoch if self._shuffle else 0, rank)
        if key not in self._plans:
            if len(self._plans) > 2 * self._world_size:
                self._plans.clear()
            order = epoch_order(
                self._windows, seed=self._seed, epoch=key[0], pool_windows=POOL_WINDOWS, shuffle=self._shuffle, rank=rank, world_size=self._world_size
            )
            self._plans[key] = pack(order, self._lengths, self._row_tokens)
        return self._plans[key]

    def _read(self, plan: RowPlan, start_row: int) -> Iterator[Batch]:
        samples = plan.samples[plan.starts[min(start_row, len(plan))] :]
        wanted = self._windows.window_of[samples]
        first_use = list(dict.fromkeys(wanted.tolist()))
        uses_left = np.bincount(wanted, minlength=len(self._windows.first))
        pending: dict[int, Future[tuple[Rows, Rows | None]]] = {}
        upcoming = iter(first_use)

        def submit_next() -> bool:
            if (window := next(upcoming, None)) is None:
                return False
            pending[window] = self._threads.submit(self._read_window, window)
            return True

        for number in range(start_row, len(plan)):
            pieces = []
            for sample in plan.row(number).tolist():
                window = int(self._windows.window_of[sample])
                while window not in pending:  # windows come up in the order of their first use
                    submit_next()
                while len(pending) < POOL_WINDOWS + READ_AHEAD and sum(not f.done() for f in pending.values()) < READ_AHEAD and submit_next():
                    pass
                rows, verifier = pending[window].result()
                pieces.append((sample, window, rows, verifier))
                uses_left[window] -= 1
            yield self._build(pieces)
            for window in {piece[1] for piece in pieces}:
                if uses_left[window] == 0:
                    del pending[window]

    def _read_window(self, window: int) -> tuple[Rows, Rows | None]:
        reader, slots = self._readers[self._windows.cache[window]], self._slots[self._windows.cache[window]]
        first, last = int(self._windows.first[window]), int(self._windows.stop[window]) - 1
        part, start, stop = int(self._parts[first]), int(self._starts[first]), int(self._starts[last] + self._lengths[last])
        features = reader.read_rows(part, start, stop, layout.HIDDEN_STATES, slots)
        return features, reader.read_rows(part, start, stop, layout.VERIFIER, (0,)) if self._need_verifier else None

    def _build(self, pieces: list[tuple[int, int, Rows, Rows | None]]) -> Batch:
        tokens, reader = self._row_tokens, self._readers[0]
        width, packed = reader.spec.hidden_size, reader.spec.mantissa_bits == 3
        layers = len(self._slots[0])
        ids, following = np.zeros(tokens, np.int64), np.full(tokens, -1, np.int64)
        document, position = np.full(tokens, PADDING, np.int32), np.zeros(tokens, np.int32)
        mask, following_mask = np.zeros(tokens, bool), np.zeros(tokens, bool)
        features = _empty_planes((tokens, layers), width, packed)
        verifier = _empty_planes((tokens,), width, False) if self._need_verifier else None
        sample_ids, sources, at = [], [], 0
        for number, (sample, window, rows, verifier_rows) in enumerate(pieces):
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
            begin = int(self._starts[sample] - self._starts[self._windows.first[window]])
            source = slice(begin, begin + length)
            features[0][here], features[1][here] = rows.exponent[:, source].transpose(1, 0, 2), rows.sign_mantissa[:, source].transpose(1, 0, 2)
            if verifier is not None and verifier_rows is not None:
                verifier[0][here], verifier[1][here] = verifier_rows.exponent[0, source], verifier_rows.sign_mantissa[0, source]
            sample_ids.append((cache, local))
            sources.append(reader.source(local))
            at += length
        bits = reader.spec.mantissa_bits
        return Batch(
            input_ids_T=torch.from_numpy(ids),
            document_T=torch.from_numpy(document),
            position_T=torch.from_numpy(position),
            loss_mask_T=torch.from_numpy(mask),
            next_ids_T=torch.from_numpy(following),
            next_supervised_T=torch.from_numpy(following_mask),
            features=Planes(torch.from_numpy(features[0]), torch.from_numpy(features[1]), bits),
            verifier=Planes(torch.from_numpy(verifier[0]), torch.from_numpy(verifier[1]), 7) if verifier is not None else None,
            sample_ids=tuple(sample_ids),
            sources=tuple(sources),
        )


def _empty_planes(shape: tuple[int, ...], width: int, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((*shape, width), np.uint8), np.zeros((*shape, width // 2 if packed else width), np.uint8)
