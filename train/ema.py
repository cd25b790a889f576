"""A running mean of the weights: what evaluation and export take instead of the weights of the last step.

In: the parameters after each step. Out: float32 tensors under the parameters' names. Off unless `optim.ema_decay` is set.
"""

from __future__ import annotations

import torch
from torch import nn

from ..common.errors import RunFailed
from .dist import placed


class WeightMean:
    """mean <- mean + (1 - d) * (weight - mean) after each step that changed weights; it starts as the first weights.

    d is min(decay, (1 + t) / (10 + t)) after t steps, so that the first weights are soon forgotten; as in TensorFlow's
    ExponentialMovingAverage.
    """

    def __init__(self, drafter: nn.Module, decay: float) -> None:
        self._parameters, self._decay = dict(drafter.named_parameters()), decay
        self.tensors = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self, changes: int) -> None:
        """After the step that was the `changes`-th (from 1) to change weights."""
        decay = min(self._decay, (1 + changes) / (10 + changes))
        torch._foreach_lerp_(list(self.tensors.values()), [p.detach() for p in self._parameters.values()], 1 - decay)

    def restore(self, tensors: dict[str, torch.Tensor], place: str) -> None:
        """Go on from a checkpoint's tensors. Raises RunFailed when they do not fit."""
        found, expected = ({name: tuple(tensor.shape) for name, tensor in of.items()} for of in (tensors, self.tensors))
        if found != expected:
            odd = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            raise RunFailed("the running mean of the weights does not fit the drafter", place=place, found=odd[:5])
        for name, tensor in tensors.items():
            self.tensors[name].copy_(placed(tensor, self._parameters[name]))
