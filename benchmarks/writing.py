"""The writer alone: rows of documents in memory to published parts, by number of threads. Raw bfloat16 megabytes.

    python benchmarks/writing.py                                 Qwen3-8B's sizes, 1 thread and all cores less two, into /dev/shm
    python benchmarks/writing.py --threads 4,8,12 --folder .     onto a disk, fsync included

States are gaussian with channels of different scale, as in cache_formats.py. MB/s a core: raw megabytes by CPU seconds of all threads.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from builders import make_spec

from dflash_cache.common.sample import Sample
from dflash_cache.extract.encoder import default_threads
from dflash_cache.extract.writer import CacheWriter, open_cache

DOCUMENT = 1792


def documents(hidden: int, layers: int) -> list[np.ndarray]:
    """Two documents that are written in turn: uint16 [T, C, H]."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 0.6, (layers + 1, hidden))).astype(np.float32)
    values = [rng.standard_normal((DOCUMENT, layers + 1, hidden), np.float32) * scale for _ in range(2)]
    return [(value.view(np.uint32) >> 16).astype(np.uint16) for value in values]


def write(folder: Path, states: list[np.ndarray], tokens: int, mantissa_bits: int, threads: int) -> tuple[float, float, float]:
    """(seconds, CPU seconds, stored share of raw) of writing `tokens` tokens as the vLLM worker does."""
    _, columns, hidden = states[0].shape
    spec = make_spec(
        hidden=hidden, layer_ids=tuple(range(columns - 1)), num_layers=columns, chunk_tokens=512, part_tokens=131_072, mantissa_bits=mantissa_bits
    )
    open_cache(folder, spec)
    writer = CacheWriter(folder, spec, threads=threads, overlapped=True)
    ids, mask = np.zeros(DOCUMENT, np.int32), np.ones(DOCUMENT, np.uint8)
    began, cpu_began = time.perf_counter(), time.process_time()
    for number in range(tokens // DOCUMENT):
        bits = states[number % 2]
        writer.add(Sample(number.to_bytes(16, "little"), "benchmark", number, ids, mask, bits[:, :-1], bits[:, -1], 0, -1))
    writer.close()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return seconds, cpu, writer.stored_bytes / (tokens // DOCUMENT * states[0].nbytes)


def main() -> None:
    """Print one line for each number of threads and mantissa bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=f"1,{default_threads()}", help="(default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where to write (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16_384, help="(default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=4096, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many counts (default: %(default)s)")
    options = parser.parse_args()
    states = documents(options.hidden, 5)
    raw = options.tokens // DOCUMENT * states[0].nbytes / 1e6
    print(f"{'mantissa bits':>13} {'threads':>8} {'MB/s':>7} {'MB/s a core':>12} {'cores':>6} {'of raw':>7}")
    for mantissa_bits in (7, 3):
        for threads in dict.fromkeys(int(number) for number in options.threads.split(",")):
            found = []
            for _ in range(options.repeats):
                folder = Path(tempfile.mkdtemp(prefix="writing-", dir=options.folder))
                try:
                    found.append(write(folder / "cache", states, options.tokens, mantissa_bits, threads))
                finally:
                    shutil.rmtree(folder)
            seconds, cpu, share = min(found)
            print(f"{mantissa_bits:13} {threads:8} {raw / seconds:7,.0f} {raw / cpu:12,.0f} {cpu / seconds:6.1f} {share:7.3f}")


if __name__ == "__main__":
    main()
