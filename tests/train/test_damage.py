"""Whatever is done to any file of a cache, the reader raises or returns what was written, and `verify` names the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numcodecs import zstd

from dflash_cache.common import layout, target_folder
from dflash_cache.common.errors import CacheDamaged, InputError
from dflash_cache.common.fingerprint import canonical, digest_bytes
from dflash_cache.common.sample import Sample
from dflash_cache.extract.writer import CacheWriter
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.verify import verify

LENGTHS = [30, 34, 29, 35]
"""Two parts of 64 tokens and two samples each, so that their files are of equal size one by one."""


@pytest.fixture
def cache(write_cache) -> tuple[Path, list[Sample]]:
    path, _, samples = write_cache(lengths=LENGTHS, next_token=5)
    assert [part.manifest.tokens for part in CacheReader(path).parts] == [64, 64]
    return path, samples


def reads_right_or_raises(path: Path, samples: list[Sample]) -> bool:
    """True when every sample came back as written, False when damage was raised; anything else fails the test."""
    try:
        reader = CacheReader(path)
        stored = [reader.read_sample(number) for number in range(reader.num_samples)]
    except CacheDamaged:
        return False
    assert len(stored) == len(samples)
    for ours, theirs in zip(stored, samples, strict=True):
        for name in Sample.__dataclass_fields__:
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    return True


def named(path: Path, *files: Path) -> bool:
    """Does `verify` name each of `files` (or a file in it)?"""
    places = [problem.place for problem in verify(path, teacher=False).problems]
    return all(any(place.startswith(str(file)) for place in places) for file in files)


def files_of(part: Path) -> list[Path]:
    return sorted(path for path in part.rglob("*") if path.is_file())


DAMAGE: dict[str, Callable[[Path], object]] = {
    "delete": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncate": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "grow": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "rename": lambda path: path.rename(path.with_name("other")),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_file_of_a_part_damaged_in_turn(cache, kind):
    path, samples = cache
    part = path / "parts/00000001-0000"
    for file in files_of(part):
        intact = file.read_bytes()
        DAMAGE[kind](file)
        right = reads_right_or_raises(path, samples)
        assert not right or (kind == "zeros" and file.name == "zarr.json")  # arrays' metadata is for other readers; verify checks it
        assert named(path, part if file == part / "zarr.json" else file), file
        file.with_name("other").unlink(missing_ok=True)
        file.write_bytes(intact)
    assert reads_right_or_raises(path, samples)


def test_one_bit_of_every_byte_of_the_small_files_and_of_some_of_the_large(cache):
    path, samples = cache
    part = path / "parts/00000000-0000"
    touched = [file for file in files_of(part) if file.name != "zarr.json" or file.parent == part]
    for file in touched:
        intact = file.read_bytes()
        for byte in range(0, len(intact), max(1, len(intact) // 25)):
            damaged = bytearray(intact)
            damaged[byte] ^= 1 << byte % 8
            file.write_bytes(damaged)
            assert not reads_right_or_raises(path, samples), (file, byte)
        file.write_bytes(intact)


def swap(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def test_any_two_files_of_one_size_swapped_are_named_and_never_read_in_silence(cache):
    """Shards of sign_mantissa are of one size and keep valid checksums wherever they are moved; so do arrays of one type."""
    path, samples = cache
    everything = [file for part in sorted((path / "parts").iterdir()) for file in files_of(part)]
    pairs = [(a, b) for a, b in combinations(everything, 2) if a.stat().st_size == b.stat().st_size and a.read_bytes() != b.read_bytes()]
    shards = [(a, b) for a, b in pairs if "sign_mantissa/c" in str(a)]
    assert len(shards) == 8 * 7 // 2  # four of each part: three layers and the verifier's
    assert len(pairs) > len(shards) + 10
    for one, two in pairs:
        swap(one, two)
        right = reads_right_or_raises(path, samples)
        assert not right or {one.name, two.name} == {"zarr.json"}, (one, two)
        swap(one, two)
    for one, two in shards[:6] + pairs[-3:]:
        swap(one, two)
        assert named(path, one, two), (one, two)
        swap(one, two)


def test_two_parts_that_change_places_are_refused(cache):
    path, samples = cache
    swap(path / "parts/00000000-0000", path / "parts/00000001-0000")
    assert not reads_right_or_raises(path, samples)
    assert named(path, path / "parts/00000000-0000", path / "parts/00000001-0000")


def test_a_part_of_another_cache_in_the_place_of_ours_is_refused(cache, write_cache):
    path, samples = cache
    other, _, _ = write_cache(lengths=LENGTHS, name="other", layer_ids=(1, 2, 3))
    shutil.rmtree(path / "parts/00000001-0000")
    shutil.copytree(other / "parts/00000001-0000", path / "parts/00000001-0000")
    assert not reads_right_or_raises(path, samples)


def test_a_shard_of_a_cache_of_the_same_settings_is_refused(cache, write_cache):
    """The same settings, other states: only the list of checksums tells them apart."""
    path, samples = cache
    other, _, _ = write_cache(lengths=LENGTHS, name="other", next_token=5, seed=1)
    name = "parts/00000001-0000/hidden_states/sign_mantissa/c/0/1/0"
    shutil.copy(other / name, path / name)
    assert not reads_right_or_raises(path, samples)
    assert named(path, path / name)


# --- links and other things that are no plain files


@pytest.mark.parametrize(
    "name",
    [
        "cache.json",
        "parts",
        "parts/00000001-0000",
        "parts/00000001-0000/zarr.json",
        "parts/00000001-0000/hidden_states",
        "parts/00000001-0000/hidden_states/sign_mantissa/c/0",
        "parts/00000001-0000/hidden_states/sign_mantissa/c/0/1/0",
        "parts/00000001-0000/input_ids/c/0",
    ],
)
def test_a_link_out_of_the_cache_is_refused_even_to_an_equal_copy(cache, tmp_path, name):
    path, samples = cache
    (path / name).rename(tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    assert not reads_right_or_raises(path, samples)


def test_a_linked_target_folder_and_a_linked_file_in_it_are_refused(cache, tmp_path):
    path, _ = cache
    for name in ("target", "target/head.safetensors"):
        (path / name).rename(tmp_path / "outside")
        (path / name).symlink_to(tmp_path / "outside")
        with pytest.raises(CacheDamaged):
            target_folder.check(path)
        (path / name).unlink()
        (tmp_path / "outside").rename(path / name)
    target_folder.check(path)


@pytest.mark.parametrize("name", ["../../outside", "/etc/hostname", "..", ""])
def test_a_seal_that_names_a_file_outside_of_the_folder_is_refused(cache, name):
    path, _ = cache
    (path.parent / "outside").write_text("secret")
    seal = path / "target" / target_folder.SEAL
    files = json.loads(seal.read_text())["files"] | {name: {"size": 6, "xxh3_128": digest_bytes(b"secret")}}
    seal.write_text(json.dumps({"files": files, "digest": digest_bytes(canonical(files))}))
    with pytest.raises(CacheDamaged, match=r"outside of the folder|missing"):
        target_folder.check(path)


def test_a_writer_deletes_nothing_through_a_link(cache, tmp_path):
    path, _ = cache
    spec = CacheReader(path).spec
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/00000000-0000").mkdir()
    shutil.rmtree(path / "partial")
    (path / "partial").symlink_to(tmp_path / "mine")
    with pytest.raises(CacheDamaged, match="symbolic link"):
        CacheWriter(path, spec)
    assert (tmp_path / "mine/00000000-0000").is_dir()


@pytest.mark.parametrize("name", ["parts/00000001-0000/input_ids/c/0", "parts/00000001-0000/zarr.json", "cache.json", "rejects.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(cache, name):
    path, samples = cache
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    if name == "rejects.jsonl":
        assert named(path, path / name)
    else:
        assert not reads_right_or_raises(path, samples)


# --- what is sealed rightly and still wrong, and cache.json


def test_array_metadata_that_lies_is_found_by_verify_and_does_not_matter_to_the_reader(cache):
    path, samples = cache
    file = path / "parts/00000000-0000/hidden_states/exponent/zarr.json"
    document = json.loads(file.read_text())
    intact = file.read_text()
    file.write_text(intact.replace(f"{document['shape'][0]}", "10", 1))
    assert json.loads(file.read_text())["shape"][0] == 10
    assert named(path, file)
    assert reads_right_or_raises(path, samples)


def test_a_chunk_that_decompresses_to_fewer_bytes_is_damage_and_never_old_memory(cache, make, monkeypatch):
    """Everything else about it is right: its checksum, the list of checksums, the index, the manifest's digest."""
    path, _ = cache
    spec = CacheReader(path).spec
    real = zstd.compress
    monkeypatch.setattr("dflash_cache.extract.encoder.zstd.compress", lambda data, level: real(data[:-1], level))
    writer = CacheWriter(path, spec)
    writer.add(make.sample(9, 20, spec))
    writer.close()
    with pytest.raises(CacheDamaged, match="another size"):
        CacheReader(path).read_sample(4)


def test_any_flipped_bit_of_cache_json_is_refused(cache):
    path, _ = cache
    file = path / layout.CACHE_JSON
    intact = file.read_bytes()
    for byte in range(len(intact)):
        damaged = bytearray(intact)
        damaged[byte] ^= 1 << byte % 8
        file.write_bytes(damaged)
        with pytest.raises((CacheDamaged, InputError), match=r"cache\.json"):
            CacheReader(path)


def test_a_damaged_cache_json_says_how_an_equal_one_is_had(cache):
    path, _ = cache
    (path / layout.CACHE_JSON).write_text("{")
    with pytest.raises(CacheDamaged, match="cannot be repaired, but an equal one can be had"):
        CacheReader(path)
    (path / layout.CACHE_JSON).unlink()
    with pytest.raises(CacheDamaged, match="is missing, though there are parts"):
        CacheReader(path)
    with pytest.raises(InputError, match="is no feature cache"):
        CacheReader(path.parent)
