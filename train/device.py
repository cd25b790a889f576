"""Where a run computes, in which type, and by which attention: `auto` resolved into what this machine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..common.errors import InputError
from .drafter_spec import DrafterSpec
from .float8 import MULTIPLE

FLOAT8_CAPABILITY, FLOAT8_GPUS = (8, 9), "Ada, Hopper or newer"
AttentionKind = Literal["dense", "flex"]


@dataclass(frozen=True)
class Compute:
    """Device, type of the products, attention."""

    device: torch.device
    dtype: torch.dtype
    attention: AttentionKind

    def compiles(self, wanted: bool | None) -> bool:
        """Whether the drafter is compiled. None: where it pays. Raises InputError where every row would be compiled anew."""
        if wanted and self.attention != "flex":
            fix = "leave run.compile out"
            raise InputError("pieces of a dense mask have no fixed shape to compile for", place="run.compile=true", found=str(self), fix=fix)
        return self.attention == "flex" if wanted is None else wanted

    def __str__(self) -> str:
        return f"{self.device}, {str(self.dtype).removeprefix('torch.')}, {self.attention} attention"


def resolve_compute(device: str, dtype: str, attention: str) -> Compute:
    """Raises InputError for a device that this machine lacks, and for flex attention without CUDA."""
    where = _device(device)
    kind: AttentionKind = "flex" if attention == "flex" or (attention == "auto" and where.type == "cuda") else "dense"
    if kind == "flex" and where.type != "cuda":
        raise InputError(
            "flex attention has no backward pass on this device",
            place="run.attention=flex",
            found=str(where),
            expected="a CUDA device",
            fix="--set run.attention=dense",
        )
    wanted = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(dtype)
    return Compute(where, wanted or (torch.bfloat16 if multiplies_bfloat16(where) else torch.float32), kind)


def check_float8(spec: DrafterSpec, row_tokens: int, compute: Compute) -> None:
    """Raise InputError where 8-bit products cannot be made: an older GPU, or matrices whose sides do not fit."""
    place = "run.float8=true"
    if compute.device.type == "cuda" and compute.attention != "flex":  # whose rows of queries are padded to whole tiles
        raise InputError("8-bit products need flex attention", place=place, found=f"{compute.attention} attention", fix="leave run.attention out")
    if compute.device.type == "cuda" and torch.cuda.get_device_capability(compute.device) < FLOAT8_CAPABILITY:
        raise InputError(
            "this GPU multiplies no 8-bit floating point", place=place, found=torch.cuda.get_device_name(compute.device), expected=FLOAT8_GPUS
        )
    heads = {"attention heads": spec.num_attention_heads * spec.head_dim, "key heads": spec.num_key_value_heads * spec.head_dim}
    sides = {"data.row_tokens": row_tokens, "hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size, **heads}
    odd = ", ".join(f"{name} {side}" for name, side in sides.items() if side % MULTIPLE)
    if odd:
        raise InputError("8-bit products need sides in multiples of 16", place=place, found=odd, fix="leave run.float8 out")


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`. Through page-locked memory where that is a GPU: this process then need not wait for what it still does."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def multiplies_bfloat16(device: torch.device) -> bool:
    """True when the device has bfloat16 products of its own; elsewhere they are slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private; absent in some versions
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in checks)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError("no such device", place=f"device={name}", expected="auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise InputError("this machine has no such device", place=f"device={name}", found=f"{count} CUDA devices", fix="--set run.device=auto")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
