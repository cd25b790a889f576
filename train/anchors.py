"""Anchors: which tokens of a row the drafter is trained to continue from.

In: what each position of the row means, and a generator. Out: ascending positions, padded, with a mask of the real ones.
An anchor is the last known token before a block: supervised itself, and followed by a supervised token of its document
(the last row counts too when the sample's next token is known). Pure functions on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .batch import PADDING
from .device import moved


@dataclass(frozen=True)
class Anchors:
    """A anchors of a row, ascending; padding at the end."""

    row_A: torch.Tensor
    """int64 [A]: position in the row; 0 on padding."""
    keep_A: torch.Tensor
    """bool [A]: False on padding."""

    def to(self, device: torch.device) -> Anchors:
        """The same on `device`."""
        return Anchors(moved(self.row_A, device), moved(self.keep_A, device))

    def __len__(self) -> int:
        return len(self.row_A)


def candidate_rows(document_T: torch.Tensor, loss_mask_T: torch.Tensor, next_supervised_T: torch.Tensor) -> torch.Tensor:
    """int64: every position that may be an anchor, ascending."""
    return (loss_mask_T & next_supervised_T & (document_T != PADDING)).nonzero().squeeze(1)


def draw_anchors(
    document_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    next_supervised_T: torch.Tensor,
    *,
    per_document: int,
    per_row: int,
    generator: torch.Generator,
    pad_multiple: int = 1,
) -> Anchors:
    """Draw min(valid, per_document) anchors of each document, uniformly and without replacement.

    When the row's sum exceeds `per_row`, that many of the drawn ones are kept, uniformly over the row: each document then
    keeps its share in expectation, and within it every choice is still equally likely. generator: on the CPU.
    """
    rows = candidate_rows(document_T, loss_mask_T, next_supervised_T)
    shuffled = rows[torch.randperm(len(rows), generator=generator)]
    by_document = shuffled[torch.argsort(document_T[shuffled], stable=True)]  # in each document, in random order
    _, counts = torch.unique_consecutive(document_T[by_document], return_counts=True)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    drawn = by_document[torch.arange(len(by_document)) - first < per_document]
    if len(drawn) > per_row:
        drawn = drawn[torch.randperm(len(drawn), generator=generator)[:per_row]]
    return pad_anchors(drawn.sort().values, pad_multiple)


def pad_anchors(rows: torch.Tensor, multiple: int) -> Anchors:
    """`rows` (int64, ascending) padded to a multiple of `multiple`, at least one multiple when there is any."""
    padded = -(-len(rows) // multiple) * multiple
    row_A = torch.zeros(padded, dtype=torch.int64)
    row_A[: len(rows)] = rows
    return Anchors(row_A, torch.arange(padded) < len(rows))
