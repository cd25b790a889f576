"""The draft vocabulary: which tokens a drafter with a pruned head can propose.

In: the supervised tokens of the caches. Out: the kept token ids, ascending. Nothing is stored between runs: the choice is made
anew from the data each time, so it can belong to no other run, data or size. It travels with the weights as `d2t`. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..common.errors import InputError
from .reader import CacheReader


def supervised_counts(readers: Sequence[CacheReader], held: Sequence[np.ndarray] | None = None) -> np.ndarray:
    """int64 [V]: how often each token is one that a drafter would be asked for; next tokens included.

    held: bool [S] of each reader, samples that are not looked at because an evaluation will be; None: all are.
    The ids must be known to lie inside the vocabulary, which `CacheReader.token_counts` checks.
    """
    size = readers[0].spec.settings.target.vocab_size
    total = np.zeros(size, np.int64)
    for reader, held_S in zip(readers, held or [np.zeros(reader.num_samples, bool) for reader in readers]):
        for part in range(len(reader.parts)):
            chosen, lengths = ~held_S[reader.part_of == part], reader.lengths[reader.part_of == part]
            following = reader.column(part, "next_token")[chosen]
            ids = reader.column(part, "input_ids")[reader.column(part, "loss_mask").astype(bool) & np.repeat(chosen, lengths)]
            total += np.bincount(ids, minlength=size) + np.bincount(following[following >= 0], minlength=size)
    return total


def kept_tokens(counts_V: np.ndarray, size: int) -> np.ndarray:
    """int64 [size], ascending: the most frequent tokens; among equals, and to fill up, the lowest ids.

    Raises InputError when `size` is not below the whole vocabulary.
    """
    if not 0 < size < len(counts_V):
        expected = f"1..{len(counts_V) - 1}; leave it out for the whole vocabulary"
        raise InputError("a draft vocabulary must be smaller than the target's", place="model.draft_vocab_size", found=size, expected=expected)
    order = np.argsort(-counts_V, kind="stable")
    return np.sort(order[:size]).astype(np.int64)


def coverage(counts_V: np.ndarray, kept: np.ndarray) -> float:
    """Share of the supervised tokens that are kept."""
    return float(counts_V[kept].sum() / max(counts_V.sum(), 1))
