"""What a cache holds, read with plain zarr and no code of the readers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zarr

from dflash_cache.common import planes
from dflash_cache.common.manifest import list_parts


@dataclass
class Stored:
    """One stored document, states as float32: the layers ascending, then the verifier state."""

    ids: np.ndarray
    mask: np.ndarray
    states_TCH: np.ndarray
    top1: int
    next_token: int


def read_all(cache: Path) -> dict[int, Stored]:
    """Every document by its row."""
    found = {}
    for part in list_parts(cache):
        group = zarr.open_group(part, mode="r")
        hidden = planes.merge(group["hidden_states/exponent"][:], group["hidden_states/sign_mantissa"][:])
        verifier = planes.merge(group["verifier_last_hidden_states/exponent"][:], group["verifier_last_hidden_states/sign_mantissa"][:])
        states = (np.concatenate([hidden, verifier[:, None]], 1).astype(np.uint32) << 16).view(np.float32)
        offsets = group["sample_offsets"][:]
        for sample, row in enumerate(group["source_row"][:]):
            where = slice(offsets[sample], offsets[sample + 1])
            tail = int(group["engine_top1"][sample]), int(group["next_token"][sample])
            found[int(row)] = Stored(group["input_ids"][where], group["loss_mask"][where], states[where], *tail)
    return found


def relative_errors(ours: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Of each captured layer."""
    return np.asarray(np.linalg.norm(ours - reference, axis=(0, 2)) / np.linalg.norm(reference, axis=(0, 2)))
