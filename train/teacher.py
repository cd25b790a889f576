"""Teacher tokens: the target's most likely token after each row: as kept in the cache, or computed once and remembered per sample.

In: a row's kept tokens or its verifier states, and which of its rows are asked for. Out: int64 [T] with the token of each. Neither
changes a result, because the head gives each row the same token whatever rows it is asked for with.
"""

from __future__ import annotations

import torch

from .batch import PADDING, Batch
from .target_head import TargetHead
from .targets import UNKNOWN

BYTES_PER_TOKEN = 4


class TeacherCache:
    """Remembers teacher tokens of the samples seen, at most `limit_bytes` of them; when full it starts anew."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._held = limit_bytes, 0
        self._known: dict[tuple[int, int], torch.Tensor] = {}

    def recall(self, batch: Batch) -> torch.Tensor:
        """int32 [T] on the CPU: what is known of the row's samples, UNKNOWN elsewhere. batch: on the CPU."""
        known_T = torch.full((len(batch.document_T),), UNKNOWN, dtype=torch.int32)
        for sample, rows in _document_rows(batch):
            if sample in self._known:
                known_T[rows] = self._known[sample]
        return known_T

    def remember(self, batch: Batch, tokens_T: torch.Tensor) -> None:
        """Keep what is now known (int32 [T], CPU)."""
        for sample, rows in _document_rows(batch):
            if sample not in self._known:
                size = (rows.stop - rows.start) * BYTES_PER_TOKEN
                if self._held + size > self._limit:
                    self._known.clear()
                    self._held = 0
                if size > self._limit:
                    continue
                self._held += size
            self._known[sample] = tokens_T[rows].clone()


def teacher_tokens(batch: Batch, needed_T: torch.Tensor, head: TargetHead, cache: TeacherCache | None = None) -> torch.Tensor:
    """int64 [T] on the CPU: the teacher's token of every row in `needed_T` (bool [T], CPU), UNKNOWN or more elsewhere.

    batch: on the CPU, with teacher tokens or verifier states. Only needed rows that are not yet known go through the target's head.
    """
    if batch.teacher_T is not None:
        known_T = batch.teacher_T.clone()
    else:
        known_T = cache.recall(batch) if cache is not None else torch.full((len(needed_T),), UNKNOWN, dtype=torch.int32)
    rows = (needed_T & (known_T == UNKNOWN)).nonzero().squeeze(1)
    if len(rows):
        assert batch.verifier is not None, "teacher labels need verifier states"
        known_T[rows] = head.teacher_tokens(batch.verifier_rows(rows, head.device)).int().cpu()
        if cache is not None:
            cache.remember(batch, known_T)
    return known_T.long()


def _document_rows(batch: Batch) -> list[tuple[tuple[int, int], slice]]:
    documents, counts = torch.unique_consecutive(batch.document_T[batch.document_T != PADDING], return_counts=True)
    ends = counts.cumsum(0).tolist()
    return [(batch.sample_ids[number], slice(end - count, end)) for number, count, end in zip(documents.tolist(), counts.tolist(), ends)]
