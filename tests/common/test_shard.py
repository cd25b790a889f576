"""Shard files: what is written is found, what is damaged is named."""

from __future__ import annotations

import numpy as np
import pytest
from dflash_cache.common.errors import CacheDamaged
from dflash_cache.common.fingerprint import digest_file
from dflash_cache.common.shard import ShardWriter, checked_chunk, map_file, read_index


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "c" / "0"
    writer = ShardWriter(path)
    for chunk in (b"first", b"second chunk", b"3"):
        writer.append(chunk)
    record = writer.close()
    assert digest_file(path) == (record.size, record.xxh3_128)
    return path


def test_chunks_come_back_in_order(shard):
    data = map_file(shard)
    index = read_index(data, 3, "here")
    assert index.tolist() == [[0, 9], [9, 16], [25, 5]]
    assert [bytes(checked_chunk(data, int(o), int(n), "here")) for o, n in index] == [b"first", b"second chunk", b"3"]


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
        checked_chunk(data, int(offset), int(size), f"chunk {number}")


def test_every_truncation_is_found(shard):
    intact = shard.read_bytes()
    for length in range(len(intact)):
        with pytest.raises(CacheDamaged):
            _read(intact[:length])


def test_an_absent_chunk_is_damage_and_never_zeros(tmp_path):
    import struct

    import crc32c

    index = np.array([[0, 9], [2**64 - 1, 2**64 - 1]], "<u8").tobytes()
    data = memoryview(b"first" + struct.pack("<I", crc32c.crc32c(b"first")) + index + struct.pack("<I", crc32c.crc32c(index)))
    with pytest.raises(CacheDamaged, match="absent"):
        read_index(data, 2, "here")


def test_a_missing_and_an_empty_file_are_damage(tmp_path):
    (tmp_path / "empty").touch()
    for name in ("empty", "missing"):
        with pytest.raises(CacheDamaged, match=name):
            map_file(tmp_path / name)
