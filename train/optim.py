"""The optimizer: AdamW in float32, no decay on norms, and its state under the parameters' own names.

In: a drafter and an OptimConfig. Out: a torch optimizer; its moments as named tensors for a checkpoint, and back.
"""

from __future__ import annotations

import torch
from torch import nn

from ..common.errors import RunFailed
from .config import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def build_optimizer(drafter: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over all parameters; vectors (norms) are not decayed."""
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    vectors = [p for p in drafter.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(drafter: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Moments and step counts as `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`; empty before the first step."""
    stepped = [(name, parameter) for name, parameter in drafter.named_parameters() if parameter in optimizer.state]
    return {f"{moment}.{name}": optimizer.state[parameter][moment] for name, parameter in stepped for moment in MOMENTS}


def restore_optimizer(drafter: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], place: str) -> None:
    """Undo `optimizer_tensors`. Raises RunFailed when tensors are missing, left over or of another shape."""
    if not tensors:
        return
    parameters = dict(drafter.named_parameters())
    expected = {f"{moment}.{name}" for name in parameters for moment in MOMENTS}
    if set(tensors) != expected:
        raise RunFailed("the optimizer's state does not fit the drafter", place=place, found=sorted(set(tensors) ^ expected)[:5])
    for name, parameter in parameters.items():
        if tensors[f"exp_avg.{name}"].shape != parameter.shape:
            raise RunFailed("the optimizer's state has another shape than the drafter", place=f"{place}: {name}")
        optimizer.state[parameter] = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
