"""The learning rate of a step: linear warm-up, then cosine or constant. A pure function of the step's number."""

from __future__ import annotations

import math

from .config import OptimConfig


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Steps of the warm-up: `warmup_ratio` of all, rounded up."""
    return math.ceil(config.warmup_ratio * total_steps)


def lr_at(step: int, total_steps: int, config: OptimConfig) -> float:
    """Learning rate of step `step` (from 0) of `total_steps`.

    Warm-up: lr * (step + 1) / W, so that no step has rate 0. Cosine: from lr at step W towards min_lr_ratio * lr at step
    `total_steps`, which is never taken.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
