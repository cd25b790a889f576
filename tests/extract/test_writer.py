"""The writer: parts appear whole or not at all; a full disk loses nothing that was committed; resuming adds nothing twice."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash_cache.common import layout, manifest
from dflash_cache.common import spec as specs
from dflash_cache.common.errors import CacheDamaged, DiskFull, InputError
from dflash_cache.common.shard import ShardWriter
from dflash_cache.extract.part import PartBuilder, default_threads
from dflash_cache.extract.writer import CacheWriter, open_cache, stored_keys


def test_cache_json_is_there_before_the_first_part(tmp_path, make):
    spec = make.spec()
    open_cache(tmp_path / "c", spec)
    assert specs.load(tmp_path / "c") == spec
    assert manifest.list_parts(tmp_path / "c") == []


def test_another_cache_is_refused_naming_the_setting_and_nothing_is_touched(write_cache, make):
    cache, _, _ = write_cache()
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*")}
    with pytest.raises(InputError, match=r"features\.layer_ids"):
        open_cache(cache, make.spec(layer_ids=(1,)))
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("*")} == before


def test_a_folder_with_other_things_is_refused(tmp_path, make):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        open_cache(tmp_path, make.spec())


def test_parts_without_a_cache_json_are_never_taken_for_a_new_cache(write_cache, make):
    cache, spec, _ = write_cache()
    (cache / layout.CACHE_JSON).unlink()
    with pytest.raises(CacheDamaged, match=r"cache\.json: is missing, though there are parts"):
        open_cache(cache, spec)


def test_a_part_is_bounded_by_tokens_and_by_age(tmp_path, make, monkeypatch):
    spec = make.spec(part_tokens=50)
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec)
    for number in range(7):
        writer.add(make.sample(number, 20, spec))
    writer.close()
    assert [manifest.load(p, spec).tokens for p in manifest.list_parts(tmp_path / "c")] == [60, 60, 20]
    assert (writer.samples, writer.tokens, writer.parts) == (7, 140, 3)
    slow = CacheWriter(tmp_path / "c", make.spec(part_tokens=10**6))
    slow.add(make.sample(8, 20, spec))
    monkeypatch.setattr(PartBuilder, "age_seconds", 601.0)
    slow.add(make.sample(9, 20, spec))
    assert slow.parts == 1


def test_what_is_not_published_is_gone_on_the_next_start_and_parts_keep_their_numbers(tmp_path, make):
    spec = make.spec()
    open_cache(tmp_path / "c", spec)
    first = CacheWriter(tmp_path / "c", spec)
    first.add(make.sample(0, 70, spec))  # published: over 64 tokens
    first.add(make.sample(1, 10, spec))  # not published
    assert len(list((tmp_path / "c" / layout.PARTIAL).iterdir())) == 1
    second = CacheWriter(tmp_path / "c", spec)
    assert list((tmp_path / "c" / layout.PARTIAL).iterdir()) == []
    assert stored_keys(tmp_path / "c", spec) == {make.sample(0, 70, spec).key}
    second.add(make.sample(1, 10, spec))
    second.close()
    assert [p.name for p in manifest.list_parts(tmp_path / "c")] == ["00000000-0000", "00000001-0000"]


def test_two_writers_with_different_ids_do_not_disturb_each_other(tmp_path, make):
    spec = make.spec()
    open_cache(tmp_path / "c", spec)
    one, two = CacheWriter(tmp_path / "c", spec, 1), CacheWriter(tmp_path / "c", spec, 2)
    for number in range(10):
        (one if number % 2 else two).add(make.sample(number, 15, spec))
    one.close()
    CacheWriter(tmp_path / "c", spec, 1)
    two.close()
    assert len(stored_keys(tmp_path / "c", spec)) == 10


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_space_is_a_clear_error_and_committed_parts_stay(tmp_path, make, monkeypatch, code):
    spec = make.spec()
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec)
    writer.add(make.sample(0, 70, spec))

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(ShardWriter, "append", fail)
    with pytest.raises(DiskFull, match="run the same command again") as caught:
        writer.add(make.sample(1, 40, spec))
    assert caught.value.exit_code == 1
    monkeypatch.undo()
    assert list((tmp_path / "c" / layout.PARTIAL).iterdir()) == []
    again = CacheWriter(tmp_path / "c", spec)
    again.add(make.sample(1, 40, spec))
    again.close()
    assert len(stored_keys(tmp_path / "c", spec)) == 2


def test_a_real_file_size_limit_is_met_the_same_way(tmp_path, make):
    spec = make.spec(hidden=64, part_tokens=10**6)
    open_cache(tmp_path / "c", spec)
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import builders
from pathlib import Path
from dflash_cache.extract.writer import CacheWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
spec = builders.make_spec(hidden=64, part_tokens=10**6)
writer = CacheWriter(Path({str(tmp_path / "c")!r}), spec)
try:
    for number in range(100):
        writer.add(builders.make_sample(number, 50, spec))
    writer.close()
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "DiskFull", done.stderr
    assert manifest.list_parts(tmp_path / "c") == []
    assert list((tmp_path / "c" / layout.PARTIAL).iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE) != (20000, 20000)


@pytest.mark.parametrize("call", ["os.fsync", "os.rename"])
def test_killed_between_write_fsync_and_rename_the_cache_is_valid(tmp_path, make, call):
    """The writer dies by SIGKILL at its n-th call of fsync or rename; whatever is published is whole."""
    spec = make.spec()
    for number in range(0, 12, 3):
        cache = tmp_path / f"c{number}"
        open_cache(cache, spec)
        code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import builders
from pathlib import Path
from dflash_cache.extract.writer import CacheWriter
left = {number}
original = {call}
def deadly(*a, **k):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return original(*a, **k)
{call} = deadly
spec = builders.make_spec()
writer = CacheWriter(Path({str(cache)!r}), spec)
for n in range(8):
    writer.add(builders.make_sample(n, 40, spec))
writer.close()
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True)
        assert done.returncode in (0, -signal.SIGKILL)
        for part in manifest.list_parts(cache):
            manifest.load(part, spec)
        done_keys = stored_keys(cache, spec)
        again = CacheWriter(cache, spec)
        for n in range(8):
            sample = make.sample(n, 40, spec)
            if sample.key not in done_keys:
                again.add(sample)
        again.close()
        assert len(stored_keys(cache, spec)) == 8


def test_stored_keys_refuse_a_damaged_part(write_cache):
    cache, spec, _ = write_cache()
    (cache / "parts/00000000-0000/input_ids/c/0").unlink()
    with pytest.raises(CacheDamaged, match="input_ids"):
        stored_keys(cache, spec)


@pytest.mark.parametrize("mantissa_bits", [7, 3])
def test_one_and_four_threads_write_identical_files(tmp_path, make, mantissa_bits):
    spec = make.spec(hidden=64, layer_ids=(0, 1, 2, 3, 4), mantissa_bits=mantissa_bits, part_tokens=200)
    written = []
    for threads in (1, 4):
        cache = tmp_path / str(threads)
        open_cache(cache, spec)
        writer = CacheWriter(cache, spec, threads=threads)
        for number in range(12):
            writer.add(make.sample(number, 37, spec))
        writer.close()
        written.append({path.relative_to(cache): path.read_bytes() for path in (cache / layout.PARTS).rglob("*") if path.is_file()})
    assert len(written[0]) == 2 * (12 + 1 + 2 + 4 + 2 * 9)  # shards, zarr.json of the part, its groups, its planes; small arrays
    assert written[0] == written[1]


def test_the_threads_are_as_many_as_the_cores_and_at_most_four():
    assert default_threads() == min(4, len(os.sched_getaffinity(0)))


def test_a_layer_that_cannot_be_encoded_fails_the_part_after_every_thread_has_ended(tmp_path, make, monkeypatch):
    """An error in one thread must not let another write on into a part that is being dropped."""
    spec = make.spec(layer_ids=(0, 1, 2, 3), part_tokens=10**6)
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec, threads=4)
    real, ended = PartBuilder._encode, []

    def encode(self, layer):
        if layer == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.05)
        real(self, layer)
        ended.append(layer)

    monkeypatch.setattr(PartBuilder, "_encode", encode)
    with pytest.raises(DiskFull):
        writer.add(make.sample(0, 16, spec))
    assert sorted(ended) == [1, 2, 3, 4]
    assert list((tmp_path / "c" / layout.PARTIAL).iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cache-encode")]
