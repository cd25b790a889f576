"""Two planes: exact both ways, rounding by the book."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_cache.common import planes

ALL = np.arange(65536, dtype=np.uint32).astype(np.uint16)


def value(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_split_and_merge_are_inverse_on_every_pattern():
    exponent, sign_mantissa = planes.split(ALL)
    assert exponent.dtype == sign_mantissa.dtype == np.uint8
    assert np.array_equal(planes.merge(exponent, sign_mantissa), ALL)


def test_the_planes_hold_what_the_format_says():
    exponent, sign_mantissa = planes.split(np.array([0x3F80, 0x8000, 0xC049], np.uint16))  # 1.0, -0.0, -3.14
    assert exponent.tolist() == [127, 0, 128]
    assert sign_mantissa.tolist() == [0, 0x80, 0xC9]


def test_rounding_to_three_bits_is_nearest_even_and_never_makes_an_infinity():
    rounded = planes.round_mantissa(ALL)
    finite = planes.is_finite(ALL)
    assert (rounded[finite] & 0xF == 0).all()
    assert planes.is_finite(rounded[finite]).all()
    assert np.array_equal(planes.is_finite(rounded), finite)
    ones = np.array([0x3F80, 0x3F87, 0x3F88, 0x3F89, 0x3F98, 0x3F97], np.uint16)
    assert [hex(b) for b in planes.round_mantissa(ones)] == ["0x3f80", "0x3f80", "0x3f80", "0x3f90", "0x3fa0", "0x3f90"]
    assert planes.round_mantissa(np.array([0x7F80, 0xFF80], np.uint16)).tolist() == [0x7F80, 0xFF80]
    assert np.isnan(value(planes.round_mantissa(np.array([0x7FC1, 0x7F81], np.uint16)))).all()


def test_rounding_errs_by_at_most_a_sixteenth():
    normal = ALL[(ALL & 0x7F80 != 0) & ((ALL & 0x7FFF) < 0x7F70)]
    exact, rounded = value(normal).astype(np.float64), value(planes.round_mantissa(normal)).astype(np.float64)
    assert (np.abs(rounded - exact) <= np.abs(exact) / 16).all()


def test_packed_nibbles_come_back():
    bits = planes.round_mantissa(ALL[planes.is_finite(ALL)])
    bits = bits[: len(bits) // 2 * 2].reshape(-1, 2)
    exponent, packed = planes.encode(bits, 3)
    assert packed.shape == (len(bits), 1)
    assert np.array_equal(planes.decode(exponent, packed, 3), bits)


@pytest.mark.parametrize("mantissa_bits", [7, 3])
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_encoding_in_blocks_equals_encoding_at_once_on_every_pattern(monkeypatch, mantissa_bits, block):
    monkeypatch.setattr(planes, "ENCODE_BLOCK", block)
    bits = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16).reshape(-1, 32)
    finite = bits[planes.is_finite(bits).all(1)]
    for rows in (bits, finite, bits[:3], bits[:0]):
        wanted = planes.encode(rows, mantissa_bits)
        found = tuple(np.full_like(plane, 0xAA) for plane in wanted)
        planes.encode_into(rows, mantissa_bits, *found)
        assert np.array_equal(found[0], wanted[0])
        assert np.array_equal(found[1], wanted[1])


def test_one_pattern_that_is_not_finite_is_found_among_all_that_are():
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[planes.is_finite(every)]
    assert planes.all_finite(finite)
    assert planes.all_finite(finite[:0])
    for odd in every[~planes.is_finite(every)]:
        assert not planes.all_finite(np.array([0, odd, 0xBF80, 0x3F80], np.uint16)), hex(odd)
