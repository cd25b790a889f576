"""Bytes and speed of ways to keep activations, one core each, in the same run.

    python benchmarks/cache_formats.py                          synthetic states, 5 + 1 layers of width 4096
    python benchmarks/cache_formats.py --cache demo/cache       the states of a real cache

Encode: from bfloat16 in memory to files, fsync left out. Decode: from files in the page cache to bfloat16 torch tensors.
MB/s count raw bfloat16 bytes. Ours is the writer and the mapped reader of the project, checksums and digests included.
"""

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "BLOSC_NTHREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

import argparse  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import tensorstore  # noqa: E402
import torch  # noqa: E402
import zarr  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from zarr.codecs import BloscCodec  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from builders import make_spec  # noqa: E402

from dflash_cache.common import layout, manifest, planes  # noqa: E402
from dflash_cache.common.sample import Sample  # noqa: E402
from dflash_cache.extract import writer as writer_module  # noqa: E402
from dflash_cache.train.reader import CacheReader  # noqa: E402

DOCUMENT = 512
CHUNK = 512


def synthetic(tokens: int, layers: int, hidden: int) -> np.ndarray:
    """Gaussian states whose channels differ in scale, as real ones do: uint16 [T, L, H]."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 0.6, (layers, hidden))).astype(np.float32)
    values = rng.standard_normal((tokens, layers, hidden), np.float32) * scale
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def real(cache: Path, tokens: int) -> np.ndarray:
    """The first `tokens` rows of a cache, verifier states last: uint16 [T, L + 1, H]."""
    reader, rows, count = CacheReader(cache), [], 0
    for number in range(reader.num_samples):
        sample = reader.read_sample(number)
        rows.append(np.concatenate([sample.hidden_states, sample.verifier_last_hidden_states[:, None]], 1))
        count += len(sample)
        if count >= tokens:
            break
    return np.concatenate(rows)[: count // DOCUMENT * DOCUMENT]


class Raw:
    """One raw file, memory-mapped."""

    name = "raw file, memmap"

    def encode(self, bits: np.ndarray, folder: Path) -> None:
        bits.tofile(folder / "states.bin")

    def decode(self, folder: Path, shape: tuple[int, ...]) -> torch.Tensor:
        mapped = np.memmap(folder / "states.bin", np.int16, "r", shape=shape)
        return torch.from_numpy(np.array(mapped)).view(torch.bfloat16)


class Safetensors:
    """One safetensors file per document, as the peers do."""

    name = "safetensors, one per document"

    def encode(self, bits: np.ndarray, folder: Path) -> None:
        for number in range(0, len(bits), DOCUMENT):
            states = torch.from_numpy(bits[number : number + DOCUMENT].view(np.int16)).view(torch.bfloat16)
            save_file({"hidden_states": states}, folder / f"{number}.safetensors")

    def decode(self, folder: Path, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.cat([load_file(folder / f"{number}.safetensors")["hidden_states"] for number in range(0, shape[0], DOCUMENT)])


class ZarrBlosc:
    """uint16 through zarr-python with blosc."""

    def __init__(self, cname: str, level: int, shuffle: str) -> None:
        self.name = f"zarr-python, blosc {cname}-{level} {shuffle}"
        self.codec = BloscCodec(cname=cname, clevel=level, shuffle=shuffle, typesize=2)

    def encode(self, bits: np.ndarray, folder: Path) -> None:
        array = zarr.create_array(
            folder / "a", shape=bits.shape, dtype="uint16", chunks=(CHUNK, 1, bits.shape[2]), compressors=[self.codec], filters=None
        )
        array[...] = bits

    def decode(self, folder: Path, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(zarr.open_array(folder / "a", mode="r")[...].view(np.int16)).view(torch.bfloat16)


class Ours:
    """The project's own writer and mapped reader."""

    def __init__(self, mantissa_bits: int) -> None:
        self.name = "two planes (this project)" if mantissa_bits == 7 else "two planes, 3 mantissa bits in the features"
        self.bits = mantissa_bits

    def encode(self, bits: np.ndarray, folder: Path) -> None:
        layers, hidden = bits.shape[1] - 1, bits.shape[2]
        spec = make_spec(
            hidden=hidden, layer_ids=tuple(range(layers)), num_layers=layers + 1, chunk_tokens=CHUNK, part_tokens=131_072, mantissa_bits=self.bits
        )
        writer_module.open_cache(folder / "c", spec)
        writer = writer_module.CacheWriter(folder / "c", spec)
        ids, mask = np.zeros(DOCUMENT, np.int32), np.ones(DOCUMENT, np.uint8)
        for number in range(0, len(bits), DOCUMENT):
            rows = bits[number : number + DOCUMENT]
            writer.add(Sample(number.to_bytes(16, "little"), "benchmark", number, ids, mask, rows[:, :-1], rows[:, -1], 0, -1))
        writer.close()

    def decode(self, folder: Path, shape: tuple[int, ...]) -> torch.Tensor:
        reader = CacheReader(folder / "c")
        out = np.empty(shape, np.uint16)
        for number in range(reader.parts[0].manifest.num_chunks):
            here = out[number * CHUNK : (number + 1) * CHUNK]
            for slot in range(shape[1] - 1):
                reader.fill(0, number, layout.HIDDEN_STATES, slot, [(0, here[:, slot])])
            reader.fill(0, number, layout.VERIFIER, 0, [(0, here[:, -1])])
        return torch.from_numpy(out).view(torch.bfloat16)


class OursByTensorstore(Ours):
    """The same files, read by tensorstore."""

    def __init__(self) -> None:
        super().__init__(7)
        self.name = "two planes, read by tensorstore"

    def decode(self, folder: Path, shape: tuple[int, ...]) -> torch.Tensor:
        (part,) = manifest.list_parts(folder / "c")
        out = np.empty(shape, np.uint16)
        context = {"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}}
        for array, index in ((layout.HIDDEN_STATES, slice(0, -1)), (layout.VERIFIER, -1)):
            pair = []
            for plane in layout.PLANES:
                store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(part / array / plane)}, "context": context}
                pair.append(tensorstore.open(store).result().read().result())
            out[:, index] = planes.merge(*pair)
        return torch.from_numpy(out).view(torch.bfloat16)


def best(function: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Print one line a way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="take the states of this cache instead of synthetic ones")
    parser.add_argument("--tokens", type=int, default=8192, help="rows (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many counts (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    zarr.config.set({"threading.max_workers": 1, "async.concurrency": 1})
    bits = real(options.cache, options.tokens) if options.cache else synthetic(options.tokens, 6, 4096)
    raw_bytes = bits.nbytes
    print(f"{'real' if options.cache else 'synthetic'} states {bits.shape}, {raw_bytes / 1e6:.0f} MB raw")
    print(f"{'':46} {'of raw':>7} {'bytes/token':>12} {'encode MB/s':>12} {'decode MB/s':>12}")
    ways = [
        Raw(),
        Safetensors(),
        ZarrBlosc("lz4", 5, "bitshuffle"),
        ZarrBlosc("zstd", 1, "shuffle"),
        ZarrBlosc("zstd", 5, "shuffle"),
        OursByTensorstore(),
        Ours(7),
        Ours(3),
    ]
    for way in ways:
        folder = Path(tempfile.mkdtemp())
        try:

            def encode(way: object = way, folder: Path = folder) -> None:
                shutil.rmtree(folder)
                folder.mkdir()
                way.encode(bits, folder)  # type: ignore[attr-defined]

            encode_seconds = best(encode, options.repeats)
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            decode_seconds = best(lambda way=way, folder=folder: way.decode(folder, bits.shape), options.repeats)
            if not isinstance(way, Ours) or way.bits == 7:
                assert torch.equal(way.decode(folder, bits.shape).contiguous().view(torch.int16), torch.from_numpy(bits.view(np.int16))), way.name
            print(
                f"{way.name:46} {size / raw_bytes:7.3f} {size / len(bits):12,.0f} {raw_bytes / encode_seconds / 1e6:12,.0f} {raw_bytes / decode_seconds / 1e6:12,.0f}"
            )
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
