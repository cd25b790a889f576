"""Is the GPU fed? GB/s of each stage from the disk to the device, and the share of a step's time that is spent waiting for its row.

    python benchmarks/feeding.py                       on the machine that trains: 4 GB of raw states, rows of 8,192 tokens of width 4096
    python benchmarks/feeding.py --tokens 16384 --row-tokens 2048      small; without CUDA the copies are left out
    python benchmarks/feeding.py --cache CACHE --threads 12 --step-ms 115 --json

GB/s count raw bfloat16 bytes of the states that a stage stands for, so that stages compare; `own` counts the bytes that it touches.
Cold is after the system was asked to forget the files (posix_fadvise), which it may decline, as it does for some file systems.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crc32c import crc32c
from loading import build
from numcodecs import zstd

from dflash_cache.common import layout, planes
from dflash_cache.train.device_feed import CudaCopier, fed
from dflash_cache.train.loader import MAX_THREADS, RowLoader
from dflash_cache.train.page_locked import row_memory
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.work import Rows

BLOCK = 8 << 20
WARM_UP = 3
"""Rows before times count: threads start, memory is locked."""


class Table:
    """One line for each stage."""

    def __init__(self, raw_bytes: int) -> None:
        self.raw_bytes = raw_bytes
        self.lines: list[dict[str, Any]] = []

    def add(self, stage: str, seconds: float, own_bytes: int, raw_bytes: int | None = None) -> None:
        """raw_bytes: of states, None: of the whole cache."""
        raw = (raw_bytes or self.raw_bytes) / seconds / 1e9
        self.lines.append({"stage": stage, "raw_gb_per_second": raw, "own_gb_per_second": own_bytes / seconds / 1e9, "seconds": seconds})


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def read_all(files: list[Path]) -> None:
    """Every byte once, into one buffer."""
    buffer = bytearray(BLOCK)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def forget(files: list[Path]) -> None:
    """Ask the system to drop the files from its page cache."""
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def one_core(table: Table, reader: CacheReader, files: list[Path]) -> None:
    """Disk, checksum, decompression and merge, each alone and on one core."""
    stored = sum(path.stat().st_size for path in files)
    forget(files)
    table.add("disk, cold", seconds(lambda: read_all(files)), stored)
    table.add("disk, from the page cache", seconds(lambda: read_all(files)), stored)
    contents = [path.read_bytes() for path in files[: 2 * (len(reader.spec.layer_ids) + 1)]]  # of the first part
    part = reader.parts[0].manifest
    rows, width = part.chunk_tokens, reader.spec.hidden_size
    raw = part.num_chunks * rows * width * 2 * (len(reader.spec.layer_ids) + 1)
    table.add("checksum, 1 core", seconds(lambda: [crc32c(content) for content in contents]), sum(map(len, contents)), raw)
    out = np.empty(rows * width, np.uint8)
    every = layout.shards(len(reader.spec.layer_ids))
    shards = [reader._shard(0, array, plane, slot or 0) for array, plane, slot in every if plane == layout.EXPONENT]
    chunks = [bytes(shard._checked(number)) for shard in shards for number in range(part.num_chunks)]
    table.add("decompression (zstd), 1 core", seconds(lambda: [zstd.decompress(chunk, out) for chunk in chunks]), sum(map(len, chunks)), raw)
    high, low, merged = out.reshape(rows, width), np.zeros((rows, width), np.uint8), np.empty((rows, width), np.uint16)

    def merge() -> None:
        for _ in chunks:
            planes.merge_into(high, low, planes.LOSSLESS_BITS, merged)

    table.add("merge, 1 core", seconds(merge), raw, raw)


def copies(table: Table, device: torch.device, shape: tuple[int, ...]) -> None:
    """A row's features to the device, eight times, from page-locked and from ordinary memory."""
    copier = CudaCopier(device)
    for name, memory in (("page-locked", row_memory(device)), ("ordinary", row_memory(torch.device("cpu")))):
        array = memory(shape)
        array[...] = 0
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        copier.copy(tensor)
        size = 8 * array.nbytes
        table.add(f"copy to the GPU, {name} memory", seconds(lambda sent=tensor: [copier.copy(sent) for _ in range(8)]), size, size)


@contextmanager
def feed(reader: CacheReader, options: argparse.Namespace, device: torch.device, threads: int) -> Iterator[Rows]:
    """Rows as training gets them."""
    settings = {"layer_ids": None, "row_tokens": options.row_tokens, "need_verifier": not options.no_verifier, "seed": 0}
    loader = RowLoader([reader], **settings, allocate=row_memory(device), threads=threads)
    with fed(loader, device) as rows:
        yield rows


def states_bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in (batch.features, batch.verifier) if tensor is not None)


def end_to_end(table: Table, reader: CacheReader, options: argparse.Namespace, device: torch.device, threads: int) -> None:
    """Rows as fast as they come; the first epoch warms up."""
    with feed(reader, options, device, threads) as rows:
        for _ in rows.epoch(0):
            pass
        began, size = time.perf_counter(), 0
        for batch in rows.epoch(1):
            size += states_bytes(batch)
        table.add(f"rows on {device.type}, {threads} threads", time.perf_counter() - began, size, size)


def consumer(reader: CacheReader, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Takes `step_ms` for each row, as a training step does, and says how long it waited for rows."""
    waited, rows_read, size = 0.0, 0, 0
    with feed(reader, options, device, options.threads) as rows:
        for epoch in range(3):
            source = rows.epoch(epoch)
            for number in range(rows.rows_per_epoch(epoch)):
                began = time.perf_counter()
                batch = next(source)
                ended = time.perf_counter()
                if number >= WARM_UP:
                    waited, rows_read, size = waited + ended - began, rows_read + 1, size + states_bytes(batch)
                time.sleep(options.step_ms / 1e3)
    busy = rows_read * options.step_ms / 1e3
    share, needed = (waited / (waited + busy), size / busy / 1e9) if rows_read else (float("nan"), float("nan"))
    found = {"step_ms": options.step_ms, "rows": rows_read, "waiting_share": share, "needs_gb_per_second": needed}
    return {**found, "waited_ms_a_row": waited / max(rows_read, 1) * 1e3}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="read this cache instead of a synthetic one")
    parser.add_argument("--tokens", type=int, default=81_920, help="of the synthetic part (default: %(default)s)")
    parser.add_argument("--copies", type=int, default=2, help="names of the synthetic part (default: %(default)s)")
    parser.add_argument("--row-tokens", type=int, default=8192, help="tokens in a row (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=MAX_THREADS, help="that decode (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=115.0, help="what a step takes for a row (default: %(default)s)")
    parser.add_argument("--no-verifier", action="store_true", help="as with kept teacher's tokens: verifier states are not read")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default here: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    device = torch.device(options.device, torch.cuda.current_device()) if options.device == "cuda" else torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or Path(folder) / "cache"
        if not options.cache:
            build(cache, options.tokens, options.copies)
        reader = CacheReader(cache)
        layers = len(reader.spec.layer_ids)
        shard = layout.shard_path(layout.VERIFIER, layout.EXPONENT, None)
        parts = {os.stat(part.path / shard).st_ino: part for part in reader.parts}  # copies are links
        files = [part.path / layout.shard_path(*shard) for part in parts.values() for shard in layout.shards(layers)]
        table = Table(sum(part.manifest.tokens for part in parts.values()) * reader.spec.raw_bytes_per_token)
        one_core(table, reader, files)
        if device.type == "cuda":
            copies(table, device, (options.row_tokens, layers, reader.spec.hidden_size))
        for threads in dict.fromkeys((1, options.threads)):
            end_to_end(table, reader, options, device, threads)
        waiting = consumer(reader, options, device)
    if options.json:
        print(json.dumps({"device": str(device), "tokens": reader.num_tokens, "stages": table.lines, "consumer": waiting}))
        return
    print(f"{reader.num_tokens:,} tokens, {len(os.sched_getaffinity(0))} cores, {device}")
    print(f"{'':44} {'GB/s raw':>9} {'own':>7}")
    for line in table.lines:
        print(f"{line['stage']:44} {line['raw_gb_per_second']:9.2f} {line['own_gb_per_second']:7.2f}")
    print(
        f"a step of {options.step_ms:g} ms a row needs {waiting['needs_gb_per_second']:.2f} GB/s and waits {waiting['waiting_share']:.1%} of its time "
        f"({waiting['waited_ms_a_row']:.1f} ms a row, {waiting['rows']} rows)"
    )


if __name__ == "__main__":
    main()
