"""Where a run computes, in which type, and by which attention: `auto` resolved into what this machine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..common.errors import InputError

AttentionKind = Literal["dense", "flex"]


@dataclass(frozen=True)
class Compute:
    """Device, type of the products, attention."""

    device: torch.device
    dtype: torch.dtype
    attention: AttentionKind

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
