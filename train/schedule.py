"""The learning rate of a step: linear warm-up, then cosine, linear, wsd or constant. A pure function of the step's number."""

from __future__ import annotations

import math

from .config import OptimConfig


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Steps of the warm-up: `warmup_ratio` of all, rounded up."""
    return math.ceil(config.warmup_ratio * total_steps)


def lr_at(step: int, total_steps: int, config: OptimConfig) -> float:
    """Learning rate of step `step` (from 0) of `total_steps`.

    Warm-up: lr * (step + 1) / W, so that no step has rate 0. Then from lr at step W towards min_lr_ratio * lr at step
    `total_steps`, which is never taken: along a cosine, along a line, or (wsd) not before the last `decay_ratio` of the
    steps, and then as 1 - sqrt (arXiv 2405.18392, section 4).
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * _height(step, warmup, total_steps, config))


def _height(step: int, warmup: int, total_steps: int, config: OptimConfig) -> float:
    """1 at the peak, 0 at the end."""
    begin = warmup
    if config.schedule == "wsd":
        begin = max(total_steps - math.ceil(config.decay_ratio * total_steps), warmup)
        if step < begin:
            return 1.0
    progress = min((step - begin) / max(total_steps - begin, 1), 1.0)
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if config.schedule == "linear" else 1 - math.sqrt(progress)
