"""What each slot of a block weighs: an exponential decay, what it adds to the expected accepted length (D-PACE), or all the same.

In: the number of slots, or the drafter's confidence in each label. Out: weights, never differentiated through. Pure functions.
"""

from __future__ import annotations

import torch


def slot_weights(num_slots: int, kind: str, gamma: float) -> torch.Tensor:
    """float32 [S]: exp(-j/gamma) for drafted slot j = 0, 1, ... ("exp"; slot k = j + 1 unless slot 0 drafts too), or ones ("none")."""
    distance = torch.arange(num_slots, dtype=torch.float64)
    return torch.exp(-distance / gamma).float() if kind == "exp" else torch.ones(num_slots)


def dpace_weights(confidence_AS: torch.Tensor, carries_AS: torch.Tensor, alpha: float) -> torch.Tensor:
    """float32 [A, S]: w_j = sum over m >= j of the product over i <= m of ((1 - alpha) * confidence_i + alpha); 0 where no loss is carried.

    confidence_AS: the drafter's probability of each label, in [0, 1]; 0 for a label that it cannot propose. carries_AS: bool,
    slots that are supervised. A block's end ends the sum. Source: D-PACE, arXiv 2605.18810, equations 7 and 8.
    """
    smooth_AS = (1 - alpha) * confidence_AS.float() + alpha
    reach_AS = smooth_AS.cumprod(1) * carries_AS
    return reach_AS.flip(1).cumsum(1).flip(1) * carries_AS
