"""Shard files: what is written is found, what is damaged is named."""

from __future__ import annotations

import crc32c
import numpy as np
import pytest
from numcodecs import zstd

from dflash_cache.common.errors import CacheDamaged
from dflash_cache.common.fingerprint import digest_file
from dflash_cache.common.shard import ShardWriter, checked_chunk, map_file, read_index, zstd_content_bytes

CHUNKS = (b"first", b"second chunk", b"3")
CHECKSUMS = tuple(crc32c.crc32c(chunk) for chunk in CHUNKS)


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "c" / "0"
    writer = ShardWriter(path)
    for chunk in CHUNKS:
        writer.append(chunk)
    record = writer.close()
    assert record.checksums == CHECKSUMS
    assert digest_file(path) == (record.size, record.xxh3_128)
    return path


def test_chunks_come_back_in_order(shard):
    data = map_file(shard)
    index = read_index(data, 3, "here")
    assert index.tolist() == [[0, 9], [9, 16], [25, 5]]
    assert [bytes(checked_chunk(data, int(o), int(n), w, "here")) for (o, n), w in zip(index, CHECKSUMS)] == list(CHUNKS)


def test_any_flipped_bit_is_found(shard):
    intact = shard.read_bytes()
    for byte in range(len(intact)):
        damaged = bytearray(intact)
        damaged[byte] ^= 1 << (byte % 8)
        with pytest.raises(CacheDamaged):
            _read(damaged)


def _read(raw):
    data = memoryview(bytes(raw))
    for number, (offset, size) in enumerate(read_index(data, 3, "here")):
        checked_chunk(data, int(offset), int(size), CHECKSUMS[number], f"chunk {number}")


def test_a_whole_chunk_of_another_place_is_damage(shard):
    data = map_file(shard)
    (first, size), *_ = read_index(data, 3, "here").tolist()
    with pytest.raises(CacheDamaged, match="not the one that was written here"):
        checked_chunk(data, first, size, CHECKSUMS[1], "chunk 1")


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 65_535, 65_536 + 256, 1 << 20])
def test_the_content_size_of_a_zstd_frame_is_the_one_that_was_compressed(size):
    assert zstd_content_bytes(memoryview(zstd.compress(bytes(size), 1))) == size


def test_what_is_no_zstd_frame_has_no_content_size():
    assert zstd_content_bytes(memoryview(b"")) is None
    assert zstd_content_bytes(memoryview(b"\x28\xb5\x2f\xfd")) is None
    assert zstd_content_bytes(memoryview(b"no frame at all, only text")) is None


def test_every_truncation_is_found(shard):
    intact = shard.read_bytes()
    for length in range(len(intact)):
        with pytest.raises(CacheDamaged):
            _read(intact[:length])


def test_an_absent_chunk_is_damage_and_never_zeros(tmp_path):
    import struct

    index = np.array([[0, 9], [2**64 - 1, 2**64 - 1]], "<u8").tobytes()
    data = memoryview(b"first" + struct.pack("<I", crc32c.crc32c(b"first")) + index + struct.pack("<I", crc32c.crc32c(index)))
    with pytest.raises(CacheDamaged, match="absent"):
        read_index(data, 2, "here")


def test_a_missing_and_an_empty_file_are_damage(tmp_path):
    (tmp_path / "empty").touch()
    for name in ("empty", "missing"):
        with pytest.raises(CacheDamaged, match=name):
            map_file(tmp_path / name)
