"""Matrix products in 8-bit floating point, forward and backward: twice the arithmetic of bfloat16 on GPUs that have it.

In: x [M, K] and a weight [N, K] in a wide type. Out: x W^T in the type of x, and gradients of both. Each of the three products
takes its factors as 8-bit numbers times one scale a tensor, the largest magnitude over the largest 8-bit number; sums are in
float32. Weights, gradients and the optimizer stay as wide as they were. Formats: e4m3 for values, e5m2 for gradients, which need
range more than precision (Micikevicius et al., arXiv 2209.05433).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Every side of a matrix must be a multiple of this."""
SMALLEST = 1e-12
"""Of a largest magnitude: a tensor of zeros has a scale too."""


@dataclass(frozen=True)
class Scaled:
    """numbers * scale."""

    numbers: torch.Tensor
    """8-bit [rows, columns]."""
    scale: torch.Tensor
    """float32, one number."""


def scaled(x: torch.Tensor, kind: torch.dtype) -> Scaled:
    """x as 8-bit numbers of `kind` that fill its range."""
    largest = x.detach().abs().amax().float().clamp_min(SMALLEST)
    scale = largest / torch.finfo(kind).max
    return Scaled((x.float() / scale).to(kind), scale)


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, exact: bool = False) -> torch.Tensor:
    """a [M, K] times the transpose of b [N, K], [M, N]. exact: every sum in float32, as gradients of weights want."""
    if a.numbers.device.type != "cuda":
        return ((a.numbers.float() * a.scale) @ (b.numbers.float() * b.scale).T).to(dtype)
    return torch._scaled_mm(a.numbers, b.numbers.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, use_fast_accum=not exact)


def transposed(x: Scaled) -> Scaled:
    """The same with rows and columns exchanged in memory: the units multiply only rows by rows."""
    return Scaled(x.numbers.t().contiguous(), x.scale)


class _Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        x, weight = scaled(x_MK, VALUES), scaled(weight_NK, VALUES)
        ctx.save_for_backward(x.numbers, x.scale, weight.numbers, weight.scale)
        ctx.weight_dtype = weight_NK.dtype
        return multiply(x, weight, x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, grad_MN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x_numbers, x_scale, weight_numbers, weight_scale = ctx.saved_tensors
        grad, x, weight = scaled(grad_MN, GRADIENTS), Scaled(x_numbers, x_scale), Scaled(weight_numbers, weight_scale)
        grad_x = multiply(grad, transposed(weight), grad_MN.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = multiply(transposed(grad), transposed(x), grad_MN.dtype, exact=True).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def linear8(x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """x [..., K] W^T in 8 bits. Sides that are no multiple of 16 are a programming error."""
    product: torch.Tensor = _Linear8.apply(x.flatten(0, -2), weight_NK)
    return product.unflatten(0, x.shape[:-1])
