"""The target's own decoder layers as first weights of the drafter's, read from the target's folder.

In: a folder of safetensors files, the drafter's spec and the target's final norm. Out: tensors under the drafter's names. Only
the needed tensors are read. A layer is taken whole or not at all: anything that the drafter has no place for is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import nn

from ..common.errors import InputError
from .drafter import Drafter
from .drafter_spec import DrafterSpec
from .tensor_files import TensorFiles

LAYER = re.compile(r"(.*?)layers\.(\d+)\.(.+)")
OWN_NORMS = frozenset({"self_attn.q_norm.weight", "self_attn.k_norm.weight"})
"""Norms that the drafter has and many targets lack; they then stay 1."""


def spread_blocks(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Target blocks from the first to the last, evenly spread; the last one for a drafter of one layer."""
    if num_layers == 1:
        return (num_target_layers - 1,)
    return tuple(round(number * (num_target_layers - 1) / (num_layers - 1)) for number in range(num_layers))


def target_tensors(folder: Path, spec: DrafterSpec, norm: nn.Module, blocks: Sequence[int] | None) -> dict[str, torch.Tensor]:
    """float32 tensors of the drafter's layers, and its last norm, taken from the target.

    blocks: the target's block for each drafter layer; None: evenly spread. norm: the target's final norm, from the cache.
    Raises InputError when the folder holds another target, or a block does not have the drafter's form and sizes, naming both.
    """
    blocks = tuple(blocks) if blocks is not None else spread_blocks(spec.num_layers, spec.num_target_layers)
    if len(blocks) != spec.num_layers or not all(0 <= block < spec.num_target_layers for block in blocks):
        expected = f"{spec.num_layers} blocks out of 0..{spec.num_target_layers - 1}"
        raise InputError("does not fit the drafter and its target", place="init.target_blocks", found=list(blocks), expected=expected)
    files = _open(folder)
    prefix = _prefix(files.names, spec.num_target_layers, folder)
    final = files.read(f"{prefix}norm.weight")
    one = norm_offset(norm, str(folder))
    (scale,) = norm.parameters()
    if not torch.equal(final, scale.detach().cpu().to(final.dtype)):
        problem, fix = "holds another target than the cache was made from: its final norm differs", "name the folder of that very target"
        raise InputError(problem, place=f"init.from {folder}", fix=fix)
    found = {"norm.weight": final.float() + one}
    for number, block in enumerate(blocks):
        for name, tensor in _block(files, f"{prefix}layers.{block}.", spec, folder).items():
            found[f"layers.{number}.{name}"] = tensor.float() + one if tensor.dim() == 1 else tensor.float()
    return found


def norm_offset(norm: nn.Module, place: str) -> float:
    """What the target's norm adds to its weight before it multiplies: 0, or 1 for zero-centred ones.

    Told from what the norm does to a vector of ones. Raises InputError for a norm that is no RMSNorm with a weight.
    """
    weight = getattr(norm, "weight", None)
    if isinstance(weight, torch.Tensor) and len(list(norm.parameters())) == 1:
        with torch.no_grad():
            scale = norm(torch.ones_like(weight)[None])[0].float()
        for offset in (0.0, 1.0):
            if torch.allclose(scale, weight.detach().float() + offset, atol=0.02, rtol=0.02):
                return offset
    raise InputError("the target's norms are no RMSNorm, as the drafter's are", place=f"init.from {place}", found=type(norm).__name__)


def _open(folder: Path) -> TensorFiles:
    try:
        return TensorFiles(folder)
    except InputError as error:
        raise InputError(error.problem, place=f"init.from {error.place}", expected=f"a target's folder: {error.expected}") from None


def _prefix(names: Collection[str], num_layers: int, folder: Path) -> str:
    """What stands before `layers.N.` in the names of the text model: its layers are as many as the target's."""
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(LAYER.fullmatch, names)):
        numbers.setdefault(match[1], set()).add(int(match[2]))
    fitting = [
        p for p, layers in numbers.items() if layers == set(range(num_layers)) and {f"{p}norm.weight", f"{p}embed_tokens.weight"} <= set(names)
    ]
    if len(fitting) != 1:
        counts = ", ".join(f"{len(layers)} under {prefix or 'no name'}" for prefix, layers in sorted(numbers.items()))
        raise InputError("has not the target's layers", place=f"init.from {folder}", found=counts or "no layers", expected=f"{num_layers} layers")
    return fitting[0]


def _block(files: TensorFiles, prefix: str, spec: DrafterSpec, folder: Path) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        wanted = {name: list(tensor.shape) for name, tensor in Drafter(spec).layers[0].state_dict().items()}
    there = {name.removeprefix(prefix) for name in files.names if name.startswith(prefix)}
    odd = [f"no {name}" for name in sorted(wanted.keys() - there - OWN_NORMS)]
    odd += [f"{name}, which the drafter lacks" for name in sorted(there - wanted.keys()) if not name.endswith("rotary_emb.inv_freq")]
    tensors = {name: files.read(prefix + name) for name in sorted(there & wanted.keys())}
    odd += [f"{name} {list(t.shape)}, the drafter's is {wanted[name]}" for name, t in tensors.items() if list(t.shape) != wanted[name]]
    if odd:
        problem, fix = "this block cannot become a drafter layer", "choose others with init.target_blocks, fit the sizes in [model], or start without"
        raise InputError(problem, place=f"init.from {folder} {prefix}", found="; ".join(odd[:6]), fix=fix)
    return tensors
