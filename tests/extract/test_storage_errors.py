"""No space, no quota, no permission, a read-only file system: a clear error, nothing committed is lost, the same call continues."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_cache.common import atomic, layout
from dflash_cache.common.errors import DflashError, DiskFull, InputError
from dflash_cache.common.lock import only_writer
from dflash_cache.common.shard import ShardWriter
from dflash_cache.extract.rejects import Reject, load_rejects, save_rejects
from dflash_cache.extract.target import read_target
from dflash_cache.extract.target_files import write_target_files
from dflash_cache.extract.tokens import load_tokenizer
from dflash_cache.extract.writer import CacheWriter, open_cache, stored_keys

KINDS = [
    *((code, DiskFull, 1) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    *((code, InputError, 2) for code in (errno.EACCES, errno.EPERM, errno.EROFS)),
]
kinds = pytest.mark.parametrize(("code", "error", "exit_code"), KINDS, ids=[errno.errorcode[code] for code, *_ in KINDS])


def failing(code: int) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code), "somewhere")

    return fail


def assert_clear(error: DflashError, place: Path, exit_code: int) -> None:
    assert str(place) in error.place
    assert error.expected
    assert "the same command again" in error.fix
    assert error.exit_code == exit_code


@kinds
@pytest.mark.parametrize("call", ["pathlib.Path.mkdir", "os.fsync", "os.replace"])
def test_a_cache_that_cannot_be_begun(tmp_path, make, monkeypatch, call, code, error, exit_code):
    cache = tmp_path / "c"
    with monkeypatch.context() as patch:
        patch.setattr(call, failing(code))
        with pytest.raises(error) as caught:
            open_cache(cache, make.spec())
    assert_clear(caught.value, cache, exit_code)
    open_cache(cache, make.spec())
    assert [path.name for path in cache.iterdir()] == [layout.CACHE_JSON]


@kinds
def test_a_cache_that_cannot_be_continued_is_told_before_any_work(write_cache, monkeypatch, code, error, exit_code):
    cache, spec, _ = write_cache()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", failing(code))
        with pytest.raises(error) as caught:
            open_cache(cache, spec)
    assert_clear(caught.value, cache, exit_code)
    assert open_cache(cache, spec) == spec


@kinds
@pytest.mark.parametrize(
    "place",
    [
        (ShardWriter, "__init__"),
        (ShardWriter, "append"),
        (ShardWriter, "close"),
        (Path, "mkdir"),
        (os, "fsync"),
        (os, "rename"),
    ],
    ids=lambda place: f"{place[0].__name__}.{place[1]}",
)
def test_a_part_that_cannot_be_written_is_dropped_and_what_was_published_stays(tmp_path, make, monkeypatch, place, code, error, exit_code):
    spec, cache = make.spec(), tmp_path / "c"
    open_cache(cache, spec)
    writer = CacheWriter(cache, spec)
    writer.add(make.sample(0, 70, spec))
    with monkeypatch.context() as patch:
        patch.setattr(*place, failing(code))
        with pytest.raises(error) as caught:
            writer.add(make.sample(1, 70, spec))
    assert_clear(caught.value, cache, exit_code)
    assert list((cache / layout.PARTIAL).iterdir()) == []
    assert stored_keys(cache, spec) == {make.sample(0, 70, spec).key}
    writer.add(make.sample(1, 70, spec))
    writer.close()
    assert len(stored_keys(cache, spec)) == 2


@kinds
@pytest.mark.parametrize("call", ["shutil.copyfile", "os.fsync", "os.rename"])
def test_target_files_that_cannot_be_written_leave_nothing_behind(tmp_path, tiny_llama, monkeypatch, call, code, error, exit_code):
    target, tokenizer = read_target(str(tiny_llama)), load_tokenizer(tiny_llama, trust_remote_code=False, place="")
    with monkeypatch.context() as patch:
        patch.setattr(call, failing(code))
        with pytest.raises(error) as caught:
            write_target_files(tmp_path, target, tokenizer)
    assert_clear(caught.value, tmp_path, exit_code)
    assert list(tmp_path.iterdir()) == []
    write_target_files(tmp_path, target, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == [layout.TARGET]


@kinds
@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
def test_rejects_that_cannot_be_written_leave_the_former_list(tmp_path, monkeypatch, call, code, error, exit_code):
    save_rejects(tmp_path, [Reject("a", 0, "x")], set())
    with monkeypatch.context() as patch:
        patch.setattr(call, failing(code))
        with pytest.raises(error) as caught:
            save_rejects(tmp_path, [Reject("a", 1, "y")], set())
    assert_clear(caught.value, tmp_path / layout.REJECTS, exit_code)
    assert load_rejects(tmp_path) == [Reject("a", 0, "x")]
    assert [path.name for path in tmp_path.iterdir()] == [layout.REJECTS]


@pytest.mark.parametrize("name", ["file/cache", "n" * 300])
def test_a_place_where_no_folder_can_be_is_an_input_error(tmp_path, make, name):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        open_cache(tmp_path / name, make.spec())


def test_a_file_system_that_cannot_lock_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", failing(errno.ENOLCK))
    with pytest.raises(InputError, match="the file system cannot lock"), only_writer(tmp_path):
        pass


def test_a_probe_leaves_nothing(tmp_path):
    atomic.probe(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


REAL = """
import json, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import builders
from dflash_cache.common.errors import DflashError
from dflash_cache.extract.writer import CacheWriter, open_cache, stored_keys
cache, spec, told = Path({cache!r}), builders.make_spec(hidden=64, part_tokens=200), []
samples = [builders.make_sample(number, 90, spec) for number in range(40)]

def extract():
    try:
        open_cache(cache, spec)
        known = stored_keys(cache, spec)
        writer = CacheWriter(cache, spec)
        for sample in samples:
            if sample.key not in known:
                writer.add(sample)
        writer.close()
        told.append(["done", len(stored_keys(cache, spec))])
    except DflashError as error:
        told.append([type(error).__name__, len(stored_keys(cache, spec)), len(list((cache / "partial").iterdir()))])

def mount(*options):
    subprocess.run(["mount", *options, str(cache.parent)], check=True)

mount("-t", "tmpfs", "-o", "size=1200k", "none")
extract()
mount("-o", "remount,ro")
extract()
mount("-o", "remount,rw,size=64m")
extract()
print(json.dumps(told))
"""


def can_mount() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount")
def test_a_disk_that_is_really_full_then_read_only_then_large_enough(tmp_path):
    (tmp_path / "disk").mkdir()
    code = REAL.format(tests=str(Path(__file__).parents[1]), cache=str(tmp_path / "disk/cache"))
    done = subprocess.run(["unshare", "-m", sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    full, read_only, large = json.loads(done.stdout)
    assert full[0] == "DiskFull"
    assert 0 < full[1] < 40
    assert full[2] == 0
    assert read_only == ["InputError", full[1], 0]
    assert large == ["done", 40]
