"""Sample: the one record that crosses from stage one to stage two. What the writer takes is what the reader returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NO_TOKEN = -1
"""Stands in `next_token` where no token is known to follow the last row."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One document with the target's states at each of its tokens.

    Shapes: T tokens, L stored layers, H target hidden size. States are bfloat16 bit patterns in uint16.
    """

    key: bytes
    """16 bytes: content hash of what was fed to the target (`sample_key`)."""
    source: str
    """The dataset that the row came from, as the user named it."""
    source_row: int
    """0-based row in that dataset."""
    input_ids: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """uint8 [T]: 1 where the token may be learned from."""
    hidden_states: np.ndarray
    """uint16 [T, L, H]: outputs of the stored layers, ascending layer ids. Row t belongs to token t."""
    verifier_last_hidden_states: np.ndarray
    """uint16 [T, H]: raw output of the target's last block, before the final norm."""
    engine_top1: int
    """The engine's most likely token after the last row."""
    next_token: int
    """The token that does follow the last row when the target generated it (trainable as a label), else NO_TOKEN."""

    def __len__(self) -> int:
        return len(self.input_ids)
