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
from dflash_cache.extract.encoder import ChunkEncoder, default_threads
from dflash_cache.extract.part import PartBuilder
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


def written_files(cache: Path) -> dict[Path, bytes]:
    return {path.relative_to(cache): path.read_bytes() for path in (cache / layout.PARTS).rglob("*") if path.is_file()}


@pytest.mark.parametrize("mantissa_bits", [7, 3])
def test_neither_threads_nor_overlapping_change_a_byte(tmp_path, make, mantissa_bits):
    spec = make.spec(hidden=64, layer_ids=(0, 1, 2, 3, 4), mantissa_bits=mantissa_bits, part_tokens=200)
    written = []
    for threads, overlapped in ((1, False), (4, False), (1, True), (4, True), (12, True)):
        cache = tmp_path / f"{threads}{overlapped}"
        open_cache(cache, spec)
        writer = CacheWriter(cache, spec, threads=threads, overlapped=overlapped)
        for number in range(12):
            writer.add(make.sample(number, 37, spec))
        writer.close()
        assert (writer.samples, writer.parts, writer.pending_tokens) == (12, 2, 0)
        written.append(written_files(cache))
    assert len(written[0]) == 2 * (12 + 1 + 2 + 4 + 2 * 9)  # shards, zarr.json of the part, its groups, its planes; small arrays
    assert all(files == written[0] for files in written)


def test_chunks_that_are_encoded_in_any_order_are_stored_in_theirs(tmp_path, make, monkeypatch):
    """The first layers of early chunks are held up, so that later chunks overtake them."""
    spec = make.spec(hidden=64, layer_ids=(0, 1), part_tokens=10**6)
    samples = [make.sample(number, 37, spec) for number in range(8)]
    real = ChunkEncoder._encode

    def late(self, number, layer, rows):
        time.sleep(0.03 if (number + layer) % 3 == 0 else 0)
        real(self, number, layer, rows)

    written = []
    for threads in (1, 8):
        cache = tmp_path / str(threads)
        open_cache(cache, spec)
        writer = CacheWriter(cache, spec, threads=threads, overlapped=True)
        with monkeypatch.context() as patch:
            patch.setattr(ChunkEncoder, "_encode", late if threads > 1 else real)
            for sample in samples:
                writer.add(sample)
            writer.close()
        written.append(written_files(cache))
    assert written[0] == written[1]


def test_a_part_is_published_behind_the_next_one_and_never_two_at_once(tmp_path, make, monkeypatch):
    spec = make.spec(part_tokens=16)
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec, threads=2, overlapped=True)
    go, running, most = threading.Event(), [], []
    real = PartBuilder.finish

    def slow(self):
        running.append(self)
        most.append(len(running))
        go.wait()
        running.remove(self)
        return real(self)

    monkeypatch.setattr(PartBuilder, "finish", slow)
    writer.add(make.sample(0, 16, spec))  # its part waits in `finish`
    writer.add(make.sample(1, 10, spec))
    assert (writer.parts, writer.samples, writer.pending_tokens) == (0, 0, 26)
    third = threading.Thread(target=lambda: (writer.add(make.sample(2, 10, spec)), writer.close()))
    third.start()
    third.join(0.05)
    assert third.is_alive()  # a second full part waits for the first
    go.set()
    third.join()
    assert most == [1, 1]
    assert (writer.parts, writer.samples, writer.tokens, writer.pending_tokens) == (2, 3, 36, 0)
    assert [manifest.load(part, spec).samples for part in manifest.list_parts(tmp_path / "c")] == [1, 2]


def add_and_close(writer, samples):
    for sample in samples:
        writer.add(sample)
    writer.close()


def test_an_error_behind_the_scenes_reaches_the_next_call_and_drops_both_parts(tmp_path, make, monkeypatch):
    spec = make.spec(part_tokens=16)
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec, threads=2, overlapped=True)
    writer.add(make.sample(0, 16, spec))
    writer.add(make.sample(1, 4, spec))

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer._settle()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        writer.add(make.sample(2, 12, spec))  # its part fails behind the scenes
        with pytest.raises(DiskFull):
            add_and_close(writer, [make.sample(3, 4, spec)])
    writer.abandon()
    assert list((tmp_path / "c" / layout.PARTIAL).iterdir()) == []
    assert stored_keys(tmp_path / "c", spec) == {make.sample(0, 16, spec).key}


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 2), (14, 12), (64, 12)])
def test_the_threads_leave_two_cores_and_are_at_most_twelve(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert default_threads() == threads


def test_a_layer_that_cannot_be_encoded_fails_the_part_after_every_thread_has_ended(tmp_path, make, monkeypatch):
    """An error in one thread must not let another write on into a part that is being dropped."""
    spec = make.spec(layer_ids=(0, 1, 2, 3), part_tokens=10**6)
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec, threads=4)
    real, ended = ChunkEncoder._encode, []

    def encode(self, number, layer, rows):
        if layer == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.05)
        real(self, number, layer, rows)
        ended.append(layer)

    monkeypatch.setattr(ChunkEncoder, "_encode", encode)
    with pytest.raises(DiskFull):
        writer.add(make.sample(0, 16, spec))
    assert sorted(ended) == [1, 2, 3, 4]
    assert list((tmp_path / "c" / layout.PARTIAL).iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cache-encode")]
