"""Tally: adds up what was drafted for the documents of a held-out cache, over all, by source and by position in the answer.

In: rows and what was drafted from their anchors. Out: groups of counts, and what each document adds, for the bootstrap. Counts
are whole numbers, so neither the order of rows nor their packing matters; only expectations under sampling are floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .batch import PADDING, Batch
from .drafter_spec import DrafterSpec
from .metrics import BlockCounts, Chain, DraftQuality, Walk, chain, count_blocks, leading_right, quality, walk_steps
from .sampled_acceptance import SampledCounts, Way, count_document


@dataclass(frozen=True)
class DraftedBlocks:
    """Some blocks of a row and what was drafted for them. All on the CPU."""

    row_A: torch.Tensor
    """int64 [A]: anchors, ascending."""
    carries_AS: torch.Tensor
    """bool [A, S]: slots that count."""
    right_AS: torch.Tensor
    """bool [A, S]: equal to the target's most likely token."""
    right_data_AS: torch.Tensor
    """bool [A, S]: equal to the text."""
    accept_UAS: torch.Tensor | None = None
    """float64 [U, A, S]: probability of acceptance in each way to sample; None when none was asked for."""


@dataclass
class Group:
    """Counts of some documents, or of some positions in them."""

    counts: BlockCounts
    """From every anchor."""
    chain: Chain
    """From every anchor."""
    walk: Walk = field(default_factory=Walk)
    """As served."""
    documents: int = 0
    """Documents, those without an anchor too."""

    @classmethod
    def none(cls, num_slots: int) -> Group:
        """Of nothing yet."""
        return cls(BlockCounts.none(num_slots), Chain.none(num_slots))

    @property
    def quality(self) -> DraftQuality:
        """What the counts come to."""
        return quality(self.counts)

    def add(self, right_AS: torch.Tensor, carries_AS: torch.Tensor, step_A: torch.Tensor) -> None:
        """Blocks, and from which of them the walk drafts (bool [A])."""
        self.counts += count_blocks(right_AS, carries_AS)
        self.chain += chain(right_AS, carries_AS)
        self.walk += walk_of(leading_right(right_AS, carries_AS)[step_A], right_AS.shape[1])

    def to_dict(self) -> dict[str, Any]:
        """For JSON: acceptance lengths first."""
        found = self.quality
        return {
            "tau_walk": self.walk.tau,
            "tau": found.tau,
            "tau_full": found.tau_full,
            "blocks": found.blocks,
            "steps": self.walk.steps,
            "documents": self.documents,
            "accuracy_per_slot": list(found.accuracy_per_slot),
            "conditional_per_slot": list(self.chain.conditional),
        }


def walk_of(streak_N: torch.Tensor, num_slots: int) -> Walk:
    """The walk whose N steps accepted so many slots each."""
    if not len(streak_N):
        return Walk()
    accepted_S = (streak_N[:, None] > torch.arange(num_slots)).sum(0)
    return Walk(len(streak_N), int(streak_N.sum()), tuple(accepted_S.tolist()))


def answer_positions(batch: Batch, rows_A: torch.Tensor) -> torch.Tensor:
    """int64 [A]: how many supervised tokens of the same turn stand before each of `rows_A`, which are supervised."""
    mask_T, document_T = batch.loss_mask_T & (batch.document_T != PADDING), batch.document_T
    goes_on_T = torch.zeros_like(mask_T)
    goes_on_T[1:] = mask_T[1:] & mask_T[:-1] & (document_T[1:] == document_T[:-1])
    place_T = torch.arange(len(mask_T))
    start_T = torch.where(goes_on_T, 0, place_T).cummax(0).values
    return (place_T - start_T)[rows_A]


PER_DOCUMENT = ("steps", "accepted", "blocks", "streak_sum", "data_steps", "data_accepted")
"""What a document adds; behind them, for each way to sample, steps, accepted, length_sum."""
PER_WAY = 3


class Tally:
    """Adds rows up. bounds: where the buckets of positions in the answer begin, after 0."""

    def __init__(self, spec: DrafterSpec, ways: Sequence[Way] = (), bounds: Sequence[int] = ()) -> None:
        self.slots, self.block_size, self.ways = spec.num_drafted, spec.block_size, tuple(ways)
        self.whole, self.data = Group.none(self.slots), Group.none(self.slots)
        self.by_source: dict[str, Group] = {}
        self.bounds = tuple(bounds)
        self.by_position = [Group.none(self.slots) for _ in range(len(self.bounds) + 1)]
        self.sampled = [SampledCounts() for _ in self.ways]
        self.documents = self.without = 0
        self._documents: list[np.ndarray] = []
        self._sources: list[str] = []

    @property
    def walk(self) -> Walk:
        """Over all."""
        return self.whole.walk

    @property
    def counts(self) -> BlockCounts:
        """Over all."""
        return self.whole.counts

    def add(self, batch: Batch, wanted: Sequence[bool], *blocks: DraftedBlocks) -> None:
        """A row: which of its documents are meant, and what was drafted in them, in the order of their anchors."""
        for source, want in zip(batch.sources, wanted):
            self._group(source).documents += want
        self.whole.documents = self.documents = self.documents + sum(wanted)
        self.without += sum(wanted)
        if not blocks:
            return
        row_A = torch.cat([part.row_A for part in blocks])
        carries_AS, right_AS, data_AS = (torch.cat([getattr(p, name) for p in blocks]) for name in ("carries_AS", "right_AS", "right_data_AS"))
        document_A = batch.document_T[row_A].long()
        present, sizes = torch.unique_consecutive(document_A, return_counts=True)
        self.without -= len(present)
        step_A, data_step_A = (self._steps(row_A, leading_right(r, carries_AS), sizes.tolist()) for r in (right_AS, data_AS))
        self.whole.add(right_AS, carries_AS, step_A)
        self.data.add(data_AS, carries_AS, data_step_A)
        number_A = torch.tensor([list(dict.fromkeys(batch.sources)).index(source) for source in batch.sources])[document_A]
        for number, source in enumerate(dict.fromkeys(batch.sources)):
            chosen = number_A == number
            self._group(source).add(right_AS[chosen], carries_AS[chosen], step_A[chosen])
        bucket_A = torch.bucketize(answer_positions(batch, row_A), torch.tensor(self.bounds, dtype=torch.int64), right=True)
        for bucket in torch.unique(bucket_A).tolist():
            chosen = bucket_A == bucket
            self.by_position[bucket].add(right_AS[chosen], carries_AS[chosen], step_A[chosen])
        streak_A, data_streak_A = leading_right(right_AS, carries_AS), leading_right(data_AS, carries_AS)
        numbers_AX = torch.stack([step_A, step_A * streak_A, torch.ones_like(streak_A), streak_A, data_step_A, data_step_A * data_streak_A], 1)
        per_DX = torch.zeros(len(present), len(PER_DOCUMENT), dtype=torch.int64).index_add_(
            0, torch.arange(len(present)).repeat_interleave(sizes), numbers_AX.long()
        )
        sampled_DX = self._add_sampled(row_A, blocks, carries_AS, sizes.tolist())
        self._documents.append(np.concatenate([per_DX.numpy().astype(np.float64), sampled_DX], 1))
        self._sources += [batch.sources[document] for document in present.tolist()]

    def per_document(self) -> tuple[np.ndarray, list[str]]:
        """float64 [D, PER_DOCUMENT and PER_WAY of each way], and the source, of each document with an anchor."""
        width = len(PER_DOCUMENT) + PER_WAY * len(self.ways)
        return np.concatenate(self._documents) if self._documents else np.zeros((0, width)), self._sources

    def _group(self, source: str) -> Group:
        return self.by_source.setdefault(source, Group.none(self.slots))

    @staticmethod
    def _steps(row_A: torch.Tensor, streak_A: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        steps = [walk_steps(rows.tolist(), streaks.tolist()) for rows, streaks in zip(row_A.split(sizes), streak_A.split(sizes))]
        return torch.tensor([step for document in steps for step in document], dtype=torch.bool)

    def _add_sampled(self, row_A: torch.Tensor, blocks: Sequence[DraftedBlocks], carries_AS: torch.Tensor, sizes: list[int]) -> np.ndarray:
        """[D, PER_WAY of each way] of this row's documents."""
        columns: list[list[float]] = [[] for _ in sizes]
        if self.ways:
            accepts = [part.accept_UAS for part in blocks]
            accept_UAS = torch.cat([accept for accept in accepts if accept is not None], 1).numpy()
            ends = np.cumsum([0, *sizes])
            for way in range(len(self.ways)):
                for number, (start, end) in enumerate(pairwise(ends)):
                    found = count_document(row_A[start:end].numpy(), accept_UAS[way, start:end], carries_AS[start:end].numpy())
                    self.sampled[way] += found
                    columns[number] += [found.steps, found.accepted, found.length_sum]
        return np.array(columns, dtype=np.float64).reshape(len(sizes), PER_WAY * len(self.ways))
