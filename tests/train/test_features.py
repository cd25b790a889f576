"""merge_planes is common.planes.decode, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_cache.common import planes
from dflash_cache.train.batch import Planes
from dflash_cache.train.features import merge_on_device, merge_planes


@pytest.mark.parametrize("merge", [merge_planes, merge_on_device])
@pytest.mark.parametrize("mantissa_bits", [7, 3])
def test_every_bfloat16_pattern_comes_back_as_numpy_gives_it(mantissa_bits: int, merge):
    """All 65,536 patterns: both zeros, denormals, infinities, every NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 4, 64)
    exponent, sign_mantissa = planes.encode(bits, mantissa_bits)
    merged = merge(Planes(torch.from_numpy(exponent), torch.from_numpy(sign_mantissa), mantissa_bits))
    assert merged.dtype == torch.bfloat16
    assert np.array_equal(merged.view(torch.int16).numpy().view(np.uint16), planes.decode(exponent, sign_mantissa, mantissa_bits))
    if mantissa_bits == 7:
        assert np.array_equal(merged.view(torch.int16).numpy().view(np.uint16), bits)


def test_known_values():
    values = torch.tensor([1.0, -2.0, -0.0, float("inf"), 2.0**-133], dtype=torch.bfloat16)
    exponent, sign_mantissa = planes.split(values.view(torch.int16).numpy().view(np.uint16))
    assert exponent.tolist() == [127, 128, 0, 255, 0]
    merged = merge_planes(Planes(torch.from_numpy(exponent), torch.from_numpy(sign_mantissa), 7))
    assert torch.equal(merged.view(torch.int16), values.view(torch.int16))
