"""Stored planes -> bfloat16, on the device where they lie. The twin of `common.planes.decode`, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from ..common.planes import decode
from .batch import Planes

_SIGN_AND_MANTISSA = -32641  # 0x807f as int16


def merge_planes(planes: Planes) -> torch.Tensor:
    """bfloat16 [..., H] from the two uint8 planes [..., H] (sign_mantissa [..., H / 2] when 3 mantissa bits are kept).

    On a CPU numpy does it, in blocks that fit its cache: ten times as fast as whole-tensor operations on 80 MB.
    """
    if isinstance(planes, torch.Tensor):
        return planes
    if planes.exponent.device.type == "cpu":
        bits = decode(planes.exponent.numpy(), planes.sign_mantissa.numpy(), planes.mantissa_bits)
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return merge_on_device(planes)


def merge_on_device(planes: Planes) -> torch.Tensor:
    """The same in torch operations."""
    low = planes.sign_mantissa if planes.mantissa_bits == 7 else _unpack_nibbles(planes.sign_mantissa)
    # As int8 the byte's sign bit extends into the upper byte, where the mask keeps only bfloat16's own sign bit.
    sign_and_mantissa = low.view(torch.int8).to(torch.int16) & _SIGN_AND_MANTISSA
    return ((planes.exponent.to(torch.int16) << 7) | sign_and_mantissa).view(torch.bfloat16)


def _unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The even element sits in the low nibble; the four lost mantissa bits are zero."""
    return torch.stack((packed << 4, packed & 0xF0), dim=-1).flatten(-2)
