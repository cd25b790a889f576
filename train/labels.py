"""Labels: which position teaches each slot, what the text says there, and whether the slot carries loss.

In: anchors and what each position of the row means. Out: [A, S] tables of the S drafted slots: the j-th token drafted at
anchor a is that of position a+1+j, and its teacher is row a+j, from which the target predicts that position when it verifies
the block. By default slots 1..B-1 draft (slot 0 is the anchor and carries no loss): slot k = j+1 proposes the token of its own
position a+k, and row a+k-1 teaches it. When slot 0 drafts too, slot k = j proposes the token after its own. Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SlotLabels:
    """For the S drafted slots of A anchors."""

    teacher_row_AS: torch.Tensor
    """int64 [A, S]: the row whose verifier state teaches the slot; the anchor's own where there is none."""
    data_AS: torch.Tensor
    """int64 [A, S]: the text's own token there; -1 where there is none."""
    carries_AS: torch.Tensor
    """bool [A, S]: the slot carries loss."""


def slot_labels(
    anchor_A: torch.Tensor,
    keep_A: torch.Tensor,
    document_T: torch.Tensor,
    next_ids_T: torch.Tensor,
    next_supervised_T: torch.Tensor,
    num_drafted: int,
) -> SlotLabels:
    """Tables of all slots. anchor_A: int64, rows; keep_A: bool, False on padding.

    A slot carries loss when its teacher row lies inside the anchor's document and the token after that row is supervised.
    The block stops at the first slot that is not: what comes after a gap in supervision belongs to another turn, which no
    drafter would be asked to reach from this anchor.
    """
    length = len(document_T)
    offset_S = torch.arange(num_drafted, device=anchor_A.device)
    row_AS = anchor_A[:, None] + offset_S  # the first drafted token is verified against the target's output at the anchor itself
    inside_AS = row_AS < length
    row_AS = torch.where(inside_AS, row_AS, anchor_A[:, None])
    supervised_AS = inside_AS & (document_T[row_AS] == document_T[anchor_A][:, None]) & next_supervised_T[row_AS]
    carries_AS = (supervised_AS & keep_A[:, None]).cumprod(1).bool()
    return SlotLabels(
        teacher_row_AS=torch.where(carries_AS, row_AS, anchor_A[:, None]),
        data_AS=torch.where(carries_AS, next_ids_T[row_AS], -1),
        carries_AS=carries_AS,
    )
