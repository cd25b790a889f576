"""What was tried for the exponent plane and for the merge, so that the choice in FORMAT.md can be checked again.

    python benchmarks/exponent_plane.py                     synthetic states, 5 + 1 layers of width 4096
    python benchmarks/exponent_plane.py --cache demo/cache  the states of a real cache

Size: both planes over raw bfloat16, lossless, without index and checksums. Decode: MB/s of raw bfloat16 bytes that the
exponent plane alone would allow on one core, the plane decompressed from memory.
"""

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

import argparse  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from cache_formats import best, real, synthetic  # noqa: E402
from numcodecs import zstd  # noqa: E402

from dflash_cache.common import planes  # noqa: E402


def chunks_of(plane_TLH: np.ndarray, rows: int) -> list[np.ndarray]:
    """Chunks of `rows` tokens of one layer, each contiguous uint8 [rows, H]."""
    return [
        np.ascontiguousarray(plane_TLH[start : start + rows, layer])
        for layer in range(plane_TLH.shape[1])
        for start in range(0, len(plane_TLH) - rows + 1, rows)
    ]


def entropy(plane: np.ndarray) -> float:
    """Bits a value, order 0."""
    counts = np.bincount(plane.reshape(-1), minlength=256)
    share = counts[counts > 0] / plane.size
    return float(-(share * np.log2(share)).sum())


def show(title: str, share: float, speed: float | None = None) -> None:
    """One line of the table."""
    print(f"{title:48} {share:8.4f} {'' if speed is None else f'{speed:9,.0f}'}")


def try_zstd(title: str, chunks: list[np.ndarray], level: int, repeats: int) -> None:
    """Compress chunks alone, then decompress them into one buffer."""
    packed = [zstd.compress(chunk, level) for chunk in chunks]
    out = np.empty(max(chunk.size for chunk in chunks), np.uint8)

    def decompress() -> None:
        for data, chunk in zip(packed, chunks, strict=True):
            zstd.decompress(data, out[: chunk.size])

    values = sum(chunk.size for chunk in chunks)
    show(title, (sum(map(len, packed)) + values) / (2 * values), 2 * values / best(decompress, repeats) / 1e6)


def try_merges(bits: np.ndarray, repeats: int) -> None:
    """The ways to put two planes together, GB/s of bfloat16 written."""
    exponent, low = planes.split(bits)
    out = np.empty_like(bits)
    tensors = torch.from_numpy(exponent), torch.from_numpy(low)

    def whole() -> None:
        (exponent.astype(np.uint16) << 7) | (low & 0x7F) | ((low & np.uint16(0x80)) << 8)

    def in_torch() -> None:
        (tensors[0].to(torch.int16) << 7) | (tensors[1].view(torch.int8).to(torch.int16) & -32641)

    ways: list[tuple[str, Callable[[], None]]] = [
        ("numpy, whole arrays", whole),
        ("torch, whole arrays", in_torch),
        ("numpy, in blocks (this project)", lambda: planes.merge_into(exponent, low, 7, out)),
        ("plain copy of the result", lambda: np.copyto(out, bits)),
    ]
    print(f"\nmerge of {bits.shape} values{'':25} GB/s")
    for title, way in ways:
        print(f"{title:48} {bits.nbytes / best(way, repeats) / 1e9:6.1f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="take the states of this cache instead of synthetic ones")
    parser.add_argument("--tokens", type=int, default=8192, help="rows (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest of so many counts (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bits = real(options.cache, options.tokens) if options.cache else synthetic(options.tokens, 6, 4096)
    bits = bits[: len(bits) // 2048 * 2048]
    exponent, _ = planes.split(bits)
    print(f"{'real' if options.cache else 'synthetic'} states {bits.shape}")
    print(f"{'exponent plane':48} {'of raw':>8} {'decode':>9}")
    usual = chunks_of(exponent, 512)
    for level in (-1, 1, 3, 6, 12):
        try_zstd(f"zstd {level}, 512 tokens of a layer", usual, level, options.repeats)
    for rows in (64, 256, 1024, 2048):
        try_zstd(f"zstd 1, {rows} tokens of a layer", chunks_of(exponent, rows), 1, options.repeats)
    try_zstd("zstd 1, 512 tokens, channels first", [np.ascontiguousarray(chunk.T) for chunk in usual], 1, options.repeats)
    bias = np.median(exponent, axis=0).astype(np.uint8)
    try_zstd("zstd 1 of the difference to a channel's median", chunks_of(exponent - bias, 512), 1, options.repeats)
    before = np.concatenate([np.zeros_like(exponent[:1]), exponent[:-1]])
    try_zstd("zstd 1 of the difference to the token before", chunks_of(exponent - before, 512), 1, options.repeats)
    show("limit: entropy of the exponents", (8 + entropy(exponent)) / 16)
    layers = exponent.shape[1]
    show("limit: layer known", (8 + np.mean([entropy(exponent[:, layer]) for layer in range(layers)])) / 16)
    channels = [entropy(exponent[:, layer, channel]) for layer in range(layers) for channel in range(exponent.shape[2])]
    show("limit: layer and channel known", (8 + np.mean(channels)) / 16)
    try_merges(bits[:2048].reshape(2048, -1)[:, : min(4096, bits[0].size)].copy(), options.repeats)


if __name__ == "__main__":
    main()
