"""How an exported folder's tensors differ from the run's: which ones, and, where it can be told, what happened to them.

In: tensors of both, by name. Out: names and one sentence. Knows nothing of conventions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from . import checkpoint

MANY = 0.5
"""Share of differing tensors above which the folder holds other weights, rather than damaged ones."""


@dataclass(frozen=True)
class TensorStory:
    """What became of the tensors."""

    differing: tuple[str, ...]
    """Those that are not the run's, rounded to their type in the folder."""
    text: str
    """In words; empty when none differs."""


def tell(
    run: Mapping[str, torch.Tensor], folder: Mapping[str, torch.Tensor], stored: Mapping[str, str], num_layers_fed: int, place: Path | None = None
) -> TensorStory:
    """Compare. stored: each tensor's type in the folder. num_layers_fed: K, of `fc`. place: the run, whose other checkpoints are tried."""
    differing = tuple(name for name in sorted(run) if name not in folder or not _same(run[name], folder[name], stored.get(name, "float32")))
    if not differing:
        return TensorStory((), "")
    if len(differing) > MANY * len(run):
        other = _other_checkpoint(folder, stored, place) if place is not None else None
        text = f"the folder holds those of {other}" if other else f"{len(differing)} of {len(run)} differ, so the folder holds other weights"
        return TensorStory(differing, text)
    return TensorStory(
        differing, "; ".join(_explain(name, run, folder, num_layers_fed) for name in differing[:6]) + ("; ..." if len(differing) > 6 else "")
    )


def _same(ours: torch.Tensor, theirs: torch.Tensor, kind: str) -> bool:
    rounded = ours.to(getattr(torch, kind, torch.float32))
    return ours.shape == theirs.shape and torch.equal(rounded.to(theirs.dtype), theirs)


def _explain(name: str, run: Mapping[str, torch.Tensor], folder: Mapping[str, torch.Tensor], num_layers_fed: int) -> str:
    if name not in folder:
        return f"{name} is missing"
    ours, theirs = run[name], folder[name]
    if ours.shape != theirs.shape:
        return f"{name} is {list(theirs.shape)}, not {list(ours.shape)}"
    if not bool(theirs.isfinite().all()):
        return f"{name} is not finite"
    if name == "fc.weight" and (columns := _columns(ours, theirs, num_layers_fed)):
        return columns
    twin = next((other for other, tensor in run.items() if other != name and tensor.shape == theirs.shape and _close(tensor, theirs)), None)
    return f"{name} is the run's {twin}" if twin else f"{name} differs"


def _columns(ours: torch.Tensor, theirs: torch.Tensor, count: int) -> str:
    """What became of the columns of each layer."""
    own, found = ours.chunk(count, dim=1), theirs.chunk(count, dim=1)
    zero = [place for place in range(count) if not bool(found[place].any()) and bool(own[place].any())]
    if zero:
        return f"fc.weight has zeros in the columns of layer number {', '.join(map(str, zero))} (of {count}, from 0)"
    order = [next((place for place in range(count) if _close(own[place], block)), None) for block in found]
    if None not in order and order != list(range(count)):
        return f"fc.weight has the columns of its layers in the order {', '.join(map(str, order))}"
    return ""


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.bfloat16(), other.bfloat16())


def _other_checkpoint(folder: Mapping[str, torch.Tensor], stored: Mapping[str, str], run: Path) -> str | None:
    """The checkpoint file whose tensors these are."""
    for path in reversed(checkpoint.list_checkpoints(run)):
        state = checkpoint.load_state(path)
        for name in (checkpoint.EMA, checkpoint.MODEL):
            if name not in state.files:
                continue
            tensors = checkpoint.load_tensors(path, state, name)
            if all(_same(tensor, folder[key], stored.get(key, "float32")) for key, tensor in tensors.items() if key in folder):
                return f"{path.name}/{name}"
    return None
