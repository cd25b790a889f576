"""Activation checkpointing: each decoder layer computes again in the backward pass what it would otherwise have to keep.

In: the drafter's layers, changed in place. Nothing in them is random, so that the second pass gives the first one's bits.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(layers: nn.ModuleList) -> None:
    """Keep a layer's inputs only. Names of parameters stay; a forward pass without gradients is as before."""
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
