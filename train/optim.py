"""The optimizer: AdamW, or Muon on the matrices of the decoder layers; its state under the parameters' own names.

In: a drafter and an OptimConfig. Out: an Optimizer; its moments as named tensors for a checkpoint, and back. Weights and
moments are float32. `apply_gradients` is one update: one division, one clipping, one step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..common.errors import InputError, RunFailed
from .config import OptimConfig, ParameterGroup
from .dist import placed, plain

TINY = 1e-6
"""Added to the norm before it is compared with the largest allowed, as torch does."""
ADAMW_STATE, MUON_STATE = ("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",)


class Optimizer:
    """One or two torch optimizers that step together. Each group's own factor is kept in it as `lr_factor`."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """State of each parameter that has taken a step."""
        return {parameter: values for part in self.parts for parameter, values in part.state.items()}

    def step(self, divisor: torch.Tensor, good: torch.Tensor) -> bool | None:
        """Update every parameter by its gradient / `divisor`, unless not `good`. The gradients are changed.

        AdamW divides as it reads, and decides where the numbers are, so that this process need not wait for the GPU: None is
        returned. Other optimizers ask first whether it is good, and that is returned.
        """
        if any(not isinstance(part, torch.optim.AdamW) or _sharded(part) for part in self.parts):
            if not bool(good):
                return False
            torch._foreach_div_([p.grad for p in _parameters(self.parts) if p.grad is not None], divisor.item())
            for part in self.parts:
                part.step()
            return True
        for part in self.parts:
            part.grad_scale, part.found_inf = divisor.float(), (~good).float()  # type: ignore[attr-defined]  # as torch's GradScaler does
            part.step()
        return None

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)


def _parameters(parts: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [parameter for part in parts for group in part.param_groups for parameter in group["params"]]


def _sharded(part: torch.optim.Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in _parameters([part]))


def group_of(name: str, parameter: torch.Tensor) -> ParameterGroup:
    """layers: matrices inside decoder layers; inputs: other matrices (`fc`); norms: vectors."""
    if parameter.dim() <= 1:
        return "norms"
    return "layers" if name.startswith("layers.") else "inputs"


def build_optimizer(drafter: nn.Module, config: OptimConfig) -> Optimizer:
    """AdamW over all parameters, or Muon on `layers` and AdamW on the rest; vectors (norms) are not decayed.

    Muon is for hidden matrices: input layers and vectors stay with AdamW (Jordan et al., kellerjordan.github.io/posts/muon).
    Its step is scaled by 0.2 sqrt(max(rows, columns)), so that AdamW's learning rate and decay serve (arXiv 2502.16982).
    """
    members: dict[ParameterGroup, list[nn.Parameter]] = {"layers": [], "inputs": [], "norms": []}
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            members[group_of(name, parameter)].append(parameter)
    groups = {
        name: {
            "params": parameters,
            "weight_decay": 0.0 if name == "norms" else config.weight_decay,
            "lr_factor": config.lr_factors.get(name, 1.0),
        }
        for name, parameters in members.items()
        if parameters
    }
    muon = [groups.pop("layers")] if config.name == "muon" and "layers" in groups else []
    parts: list[torch.optim.Optimizer] = []
    if groups:
        parts.append(torch.optim.AdamW(list(groups.values()), lr=config.lr, betas=config.betas, eps=config.eps, fused=True))
    if muon:
        parts.append(_muon(muon, config))
    return Optimizer(parts)


def _muon(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise InputError("this torch has no Muon", place="optim.name=muon", found=torch.__version__, expected="torch 2.9 or newer")
    muon: torch.optim.Optimizer = torch.optim.Muon(
        groups, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
    )
    return muon


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """The rate of the next step, times each group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def apply_gradients(
    parameters: Iterable[nn.Parameter],
    optimizer: Optimizer,
    weight: float | torch.Tensor,
    lr: float,
    clip_norm: float,
    finite: bool | torch.Tensor,
) -> float | None:
    """Divide the summed gradients by `weight`, clip, step, and clear. Returns the norm before clipping.

    None: nothing was changed, because there was no weight or something was not finite. weight, finite: tensors where they are
    still being computed; everything is then queued behind them before this process waits.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return None
    device = gradients[0].device
    weight_sum, is_finite = (value if isinstance(value, torch.Tensor) else torch.full((), value, device=device) for value in (weight, finite))
    norm = plain(nn.utils.get_total_norm(gradients)).double() / weight_sum.to(device).double()
    good = (weight_sum.to(device) > 0) & is_finite.to(device) & norm.isfinite()
    set_lr(optimizer, lr)
    changed = optimizer.step(weight_sum.to(device) * ((norm + TINY) / clip_norm).clamp_min(1.0), good)
    optimizer.zero_grad()
    return float(norm) if (bool(good) if changed is None else changed) else None


def optimizer_tensors(drafter: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """State as `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`, `momentum_buffer.NAME`; empty before the first step."""
    state = optimizer.state
    stepped = [(name, state[parameter]) for name, parameter in drafter.named_parameters() if parameter in state]
    return {f"{kind}.{name}": values[kind] for name, values in stepped for kind in (*ADAMW_STATE, *MUON_STATE) if kind in values}


def restore_optimizer(drafter: nn.Module, optimizer: Optimizer, tensors: dict[str, torch.Tensor], place: str) -> None:
    """Undo `optimizer_tensors`. Raises RunFailed when tensors are missing, left over or of another shape."""
    if not tensors:
        return
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    kinds = {
        parameter: (part, ADAMW_STATE if isinstance(part, torch.optim.AdamW) else MUON_STATE)
        for part in optimizer.parts
        for group in part.param_groups
        for parameter in group["params"]
    }
    expected = {f"{kind}.{names[parameter]}" for parameter, (_, of) in kinds.items() for kind in of}
    if set(tensors) != expected:
        raise RunFailed("the optimizer's state does not fit the drafter", place=place, found=sorted(set(tensors) ^ expected)[:5])
    for parameter, (part, of) in kinds.items():
        found = {kind: tensors[f"{kind}.{names[parameter]}"] for kind in of}
        if found[of[0]].shape != parameter.shape:
            raise RunFailed("the optimizer's state has another shape than the drafter", place=f"{place}: {names[parameter]}")
        part.state[parameter] = {kind: _restored(kind, tensor, parameter) for kind, tensor in found.items()}


def _restored(kind: str, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return tensor.to(parameter.device) if kind == "step" else placed(tensor, parameter)
