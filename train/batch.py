"""Batch: one packed row of T tokens as tensors, and how samples become one.

In: samples' states and tokens from the reader, in the order of the packing plan. Out: a Batch on the CPU (`device_feed` moves its states).
Owns what each position means; knows nothing of anchors, masks or the model. T tokens, K selected layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from .device import moved

PADDING = -1
"""Document number of a padded position."""


@dataclass(frozen=True)
class Batch:
    """One packed row. Documents lie one after the other; padding, if any, is at the end."""

    input_ids_T: torch.Tensor
    """int64 [T]; 0 on padding."""
    document_T: torch.Tensor
    """int32 [T]: number of the document within the row, ascending from 0; PADDING on padding."""
    position_T: torch.Tensor
    """int32 [T]: position within the document, from 0; 0 on padding."""
    loss_mask_T: torch.Tensor
    """bool [T]: the token may be learned from."""
    next_ids_T: torch.Tensor
    """int64 [T]: the token that follows row t in its document, the sample's `next_token` after its last row; -1 if none."""
    next_supervised_T: torch.Tensor
    """bool [T]: that following token may be learned from."""
    features: torch.Tensor
    """bfloat16 [T, K, H]: the drafter's layers, ascending; 0 on padding."""
    verifier: torch.Tensor | None
    """bfloat16 [T, H]: raw output of the target's last block; None when the run needs none."""
    sample_ids: tuple[tuple[int, int], ...]
    """(cache number, sample number) of each document, in order."""
    sources: tuple[str, ...]
    """The dataset of each document, in order."""
    teacher_T: torch.Tensor | None = None
    """int32 [T]: the teacher's token after each row as kept in the cache, -1 where it is not known; None: computed when needed."""

    def verifier_rows(self, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Verifier states, on `device`, of these rows (int64, on the CPU), wherever the batch has them."""
        assert self.verifier is not None, "the batch was read without verifier states"
        return moved(self.verifier[moved(rows, self.verifier.device)], device)

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.document_T != PADDING).sum())

    def to(self, device: torch.device) -> Batch:
        """The same on `device`."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                moved[field.name] = value.to(device, non_blocking=True)
        return replace(self, **moved)
