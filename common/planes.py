"""Two planes: a bfloat16 split into its exponent byte and its sign+mantissa byte, and back. numpy only.

Why: on real activations the mantissa is noise and the exponent carries about 3 of its 8 bits, so each is stored as what
it is (FORMAT.md). All functions take and return arrays of any shape; bit patterns travel as uint16.
"""

from __future__ import annotations

import threading

import numpy as np

LOSSLESS_BITS = 7
PACKED_BITS = 3
BLOCK = 1 << 17
"""Elements merged at a time: 128 Ki, whose operands fit a core's second-level cache."""
ENCODE_BLOCK = 1 << 20
"""Elements encoded at a time: 1 Mi. Few long numpy calls, since between them a thread holds Python's lock."""
_MAX_FINITE = np.uint16(0x7F7F)
_INFINITY = np.uint16(0x7F80)
_SIGN = np.uint16(0x8000)
_kept = threading.local()


def split(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(exponent, sign_mantissa), both uint8 and of the shape of `bits` (uint16)."""
    exponent = (bits >> 7).astype(np.uint8)
    low = bits.astype(np.uint8)
    high = (bits >> 8).astype(np.uint8)
    return exponent, (low & np.uint8(0x7F)) | (high & np.uint8(0x80))


def merge(exponent: np.ndarray, sign_mantissa: np.ndarray) -> np.ndarray:
    """The uint16 bit patterns that `split` was given: (e << 7) | (m & 0x7f) | ((m & 0x80) << 8)."""
    return decode(exponent, sign_mantissa, LOSSLESS_BITS)


def merge_into(exponent: np.ndarray, sign_mantissa: np.ndarray, mantissa_bits: int, out: np.ndarray) -> None:
    """Undo `encode` for rows: exponent uint8 [n, H], sign_mantissa uint8 [n, H] or [n, H / 2], into `out`, uint16 [n, H].

    `out` may be a strided view, so that rows go straight to their place in a larger array. Works in blocks that stay in the
    processor's cache, four times as fast as whole-array passes. There (m & 0x7f) | ((m & 0x80) << 8) is
    (m * 0x101) & 0x807f: the byte is put into both halves, and each keeps its bits.
    """
    count, width = exponent.shape
    rows = max(1, BLOCK // width)
    low = np.empty((min(rows, count), width), np.uint16)
    for start in range(0, count, rows):
        block, here = out[start : start + rows], slice(start, start + rows)
        bits = low[: len(block)]
        mantissa = sign_mantissa[here] if mantissa_bits == LOSSLESS_BITS else unpack_nibbles(sign_mantissa[here])
        np.multiply(mantissa, np.uint16(0x101), out=bits, dtype=np.uint16)
        np.bitwise_and(bits, np.uint16(0x807F), out=bits)
        np.multiply(exponent[here], np.uint16(0x80), out=block, dtype=np.uint16)
        np.bitwise_or(block, bits, out=block)


def round_mantissa(bits: np.ndarray) -> np.ndarray:
    """Round bfloat16 patterns to 3 mantissa bits, nearest even. Infinities and NaN stay; no finite value becomes infinite."""
    magnitude = bits & np.uint16(0x7FFF)
    rounded = (magnitude.astype(np.uint32) + 7 + ((magnitude >> 4) & 1)) & 0xFFF0
    rounded = np.minimum(rounded, int(_MAX_FINITE) & 0xFFF0).astype(np.uint16)
    not_finite = magnitude >= _INFINITY
    kept = np.where(magnitude > _INFINITY, np.uint16(0x7FC0), magnitude)
    return np.where(not_finite, kept, rounded) | (bits & _SIGN)


def pack_nibbles(sign_mantissa: np.ndarray) -> np.ndarray:
    """Keep sign and the 3 upper mantissa bits of each byte and put two in one: uint8 [..., H] -> uint8 [..., H / 2].

    The even element goes into the low nibble. H must be even.
    """
    nibble = ((sign_mantissa >> 4) & 0x07) | ((sign_mantissa >> 4) & 0x08)
    return nibble[..., 0::2] | (nibble[..., 1::2] << 4)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Undo `pack_nibbles`: uint8 [..., H / 2] -> sign_mantissa uint8 [..., H], the 4 lost mantissa bits zero."""
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    out[..., 0::2] = packed << 4
    out[..., 1::2] = packed & 0xF0
    return out


def encode(bits: np.ndarray, mantissa_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The two planes as stored: lossless for 7 mantissa bits, rounded and packed for 3."""
    if mantissa_bits == LOSSLESS_BITS:
        return split(bits)
    exponent, sign_mantissa = split(round_mantissa(bits))
    return exponent, pack_nibbles(sign_mantissa)


def encode_into(bits: np.ndarray, mantissa_bits: int, exponent: np.ndarray, sign_mantissa: np.ndarray) -> None:
    """`encode`, without new memory for its results: bits uint16 [n, H], exponent uint8 [n, H], sign_mantissa uint8 [n, H] or [n, H / 2].

    All contiguous. For 3 bits ten times as fast as `encode`. Rounding to nearest even adds 7 and the lowest kept bit to the whole
    pattern: a carry out of the mantissa is the next exponent, and the sign stands above both. Where that gives an infinity, or one
    was there, the block goes through `encode`.
    """
    count, width = bits.shape
    rows = max(1, ENCODE_BLOCK // width)
    scratch = _scratch((2, min(rows, count), width))
    for start in range(0, count, rows):
        here = slice(start, start + rows)
        block, high, low = bits[here], exponent[here], sign_mantissa[here]
        one, two = scratch[:, : len(block)]
        if mantissa_bits == LOSSLESS_BITS:
            _split_into(block, high, low, one, two)
        else:
            _round_into(block, high, low, one, two)
            if not all_finite(block) or (high.size and high.max() == 0xFF):  # a NaN may have carried past the sign
                high[...], low[...] = encode(block, mantissa_bits)


def _scratch(shape: tuple[int, ...]) -> np.ndarray:
    """uint16 of `shape`, undefined, this thread's until its next call: new memory each time would cost more than filling it."""
    size = shape[0] * shape[1] * shape[2]
    if getattr(_kept, "scratch", None) is None or _kept.scratch.size < size:
        _kept.scratch = np.empty(size, np.uint16)
    scratch: np.ndarray = _kept.scratch[:size].reshape(shape)
    return scratch


def _split_into(bits: np.ndarray, exponent: np.ndarray, sign_mantissa: np.ndarray, one: np.ndarray, two: np.ndarray) -> None:
    np.right_shift(bits, np.uint16(7), out=one)
    np.copyto(exponent, one, casting="unsafe")
    np.bitwise_and(bits, np.uint16(0x807F), out=one)
    np.right_shift(one, np.uint16(8), out=two)
    np.bitwise_or(one, two, out=one)
    np.copyto(sign_mantissa, one, casting="unsafe")  # the low byte


def _round_into(bits: np.ndarray, exponent: np.ndarray, packed: np.ndarray, one: np.ndarray, two: np.ndarray) -> None:
    np.right_shift(bits, np.uint16(4), out=one)
    np.bitwise_and(one, np.uint16(1), out=one)
    np.add(one, np.uint16(7), out=one)
    np.add(one, bits, out=one)
    np.right_shift(one, np.uint16(7), out=two)
    np.copyto(exponent, two, casting="unsafe")
    np.right_shift(one, np.uint16(12), out=two)
    np.bitwise_and(two, np.uint16(0x08), out=two)
    np.right_shift(one, np.uint16(4), out=one)
    np.bitwise_and(one, np.uint16(0x07), out=one)
    np.bitwise_or(one, two, out=one)
    pairs, shifted = one.view("<u4"), two.view("<u4")  # the even element's nibble in bits 0-3, the odd one's in bits 16-19
    np.right_shift(pairs, np.uint32(12), out=shifted)
    np.bitwise_or(pairs, shifted, out=pairs)
    np.copyto(packed, pairs, casting="unsafe")


def decode(exponent: np.ndarray, sign_mantissa: np.ndarray, mantissa_bits: int) -> np.ndarray:
    """Undo `encode`: uint16 bit patterns of the shape of `exponent`, which may be any."""
    out: np.ndarray = np.empty(exponent.shape, np.uint16)
    if out.size:
        high, low = (np.ascontiguousarray(plane).reshape(-1, plane.shape[-1]) for plane in (exponent, sign_mantissa))
        merge_into(high, low, mantissa_bits, out.reshape(-1, out.shape[-1]))
    return out


def all_finite(bits: np.ndarray) -> bool:
    """Is every bfloat16 pattern finite? `is_finite(bits).all()` in two passes without a temporary array, ten times as fast.

    As uint16 the negative ones that are not finite are the largest, as int16 the positive ones.
    """
    return not bits.size or bool(bits.max() < _INFINITY | _SIGN and bits.view(np.int16).max() < _INFINITY)


def is_finite(bits: np.ndarray) -> np.ndarray:
    """True where the bfloat16 pattern is neither infinite nor NaN."""
    return (bits & np.uint16(0x7FFF)) < _INFINITY
