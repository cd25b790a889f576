"""Faults of writers elsewhere, each with the value that is right here: nothing is overwritten, mixed, skipped or stored twice."""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
from fake_engine import FakeEngine

from dflash_cache.common import atomic, manifest
from dflash_cache.common import spec as specs
from dflash_cache.common.errors import CacheDamaged, DiskFull, InputError, RunFailed
from dflash_cache.common.lock import only_writer
from dflash_cache.common.sample import Sample
from dflash_cache.common.shard import ShardWriter
from dflash_cache.extract import run as run_module
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.engine import Document, Outcome
from dflash_cache.extract.run import ExtractSummary, run
from dflash_cache.extract.tokens import tokenizer_hash
from dflash_cache.extract.writer import CacheWriter, open_cache, stored_keys
from dflash_cache.train.reader import CacheReader

ROWS = [tiny.chat(f"question {number}", "answer " * (number + 1)) for number in range(6)]
Extract = Callable[..., ExtractSummary]


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def extract(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extract:
    """extract(rows, **fields) with the fake engine, always from the file data.jsonl, into tmp_path/cache."""
    monkeypatch.setattr(run_module, "start_engine", FakeEngine)
    monkeypatch.chdir(tmp_path)

    def build(rows: list[Any] = ROWS, **given: Any) -> ExtractSummary:
        tiny.write_jsonl(tmp_path / "data.jsonl", rows)
        usual = {"model": str(tiny_llama), "data": ("data.jsonl",), "cache": tmp_path / "cache", "engine": "transformers", "max_length": 256}
        return run(ExtractConfig(**(usual | {"part_tokens": 1, "chunk_tokens": 32} | given)))

    return build


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def samples_of(cache: Path) -> dict[bytes, Sample]:
    reader = CacheReader(cache)
    return {sample.key: sample for sample in map(reader.read_sample, range(reader.num_samples))}


# --- what stands in the folder already


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\0" * 500, None], ids=["empty", "torn", "list", "null", "zeros", "absent"])
def test_parts_with_a_cache_json_that_says_nothing_are_neither_continued_nor_overwritten(write_cache, content):
    """Elsewhere such a file was taken for that of a new cache, and the first parts were written over."""
    cache, spec, _ = write_cache()
    (cache / "cache.json").unlink()
    if content is not None:
        (cache / "cache.json").write_bytes(content)
    before = snapshot(cache)
    with pytest.raises(CacheDamaged, match=r"cache\.json"):
        open_cache(cache, spec)
    assert snapshot(cache) == before


def test_parts_of_an_old_run_in_the_folder_of_a_new_one_are_refused(write_cache, make, tmp_path):
    """Elsewhere the first of them were overwritten and the others stayed in the dataset."""
    old, _, _ = write_cache(lengths=[20] * 9, part_tokens=60, name="old")
    assert len(list((old / "parts").iterdir())) == 3
    new, spec = tmp_path / "new", make.spec(layer_ids=(1, 3), part_tokens=60)
    shutil.copytree(old / "parts", new / "parts")
    before = snapshot(new)
    with pytest.raises(CacheDamaged, match="there are parts"):
        open_cache(new, spec)
    assert snapshot(new) == before
    shutil.rmtree(new)
    open_cache(new, spec)
    shutil.copytree(old / "parts", new / "parts")
    with pytest.raises(CacheDamaged, match="belongs to another cache"):
        stored_keys(new, spec)


def test_one_merge_of_the_tokenizer_is_another_cache(tmp_path, make):
    for name, merges in (("a", "h e\nl l\n"), ("b", "h e\nl o\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer_config.json").write_text("{}")
        (tmp_path / name / "merges.txt").write_text(merges)
    one, two = (tokenizer_hash(tmp_path / name) for name in ("a", "b"))
    assert one != two
    assert one == tokenizer_hash(Path(shutil.copytree(tmp_path / "a", tmp_path / "again")))
    spec = make.spec()

    def with_tokenizer(found: str) -> specs.CacheSpec:
        text = spec.settings.text.model_copy(update={"tokenizer_hash": found})
        return specs.CacheSpec(settings=spec.settings.model_copy(update={"text": text}), limits=spec.limits)

    open_cache(tmp_path / "cache", with_tokenizer(one))
    with pytest.raises(InputError, match=r"text\.tokenizer_hash"):
        open_cache(tmp_path / "cache", with_tokenizer(two))


# --- two at once


def test_two_that_prepare_one_file_never_share_a_name(tmp_path):
    names = {atomic.sibling_of(tmp_path / "cache.json").name for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith(f".cache.json.{os.getpid()}.") for name in names)


def test_two_that_write_one_file_at_once_leave_it_whole_at_every_moment(tmp_path):
    path, texts = tmp_path / "cache.json", [letter * 20_000 for letter in (b"a", b"b")]
    atomic.write_bytes(path, texts[0])
    threads = [threading.Thread(target=lambda text=text: [atomic.write_bytes(path, text) for _ in range(100)]) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_bytes() in texts
    assert path.read_bytes() in texts
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache.json"]


HOLD = """
import sys, time
from pathlib import Path
from dflash_cache.common.lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_who_comes_second_is_told_at_once_who_holds_the_cache_and_a_dead_ones_hold_is_over(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "cache")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        started = time.monotonic()
        with pytest.raises(InputError, match="another extraction is writing") as caught, only_writer(tmp_path / "cache"):
            pass
        assert time.monotonic() - started < 5
        assert caught.value.exit_code == 2
        if Path("/proc/locks").exists():
            assert f"process {holder.pid} " in str(caught.value)
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    with only_writer(tmp_path / "cache"):
        pass


# --- what is written


def test_seven_samples_in_parts_of_three_are_three_three_and_one(tmp_path, make):
    """The counts in the manifests are those of the data, whatever a division would give: lengths differ."""
    spec, lengths = make.spec(part_tokens=30), [10, 11, 12, 9, 10, 13, 1]
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec)
    for number, length in enumerate(lengths):
        writer.add(make.sample(number, length, spec, prompt=length // 2))
    writer.close()
    found = [manifest.load(part, spec) for part in manifest.list_parts(tmp_path / "c")]
    assert [part.samples for part in found] == [3, 3, 1]
    assert [part.tokens for part in found] == [33, 32, 1]
    assert [part.supervised_tokens for part in found] == [5 + 6 + 6, 5 + 5 + 7, 1]


def test_a_shard_is_written_once_from_front_to_back_and_never_read(tmp_path, make, monkeypatch):
    """Elsewhere each inner chunk rewrites, or reads, the whole shard. Here: one opening, as many bytes as the file has."""
    spec = make.spec(part_tokens=160)
    open_cache(tmp_path / "c", spec)
    opened: list[tuple[str, str]] = []
    written: dict[str, int] = {}
    real_open, real_write = builtins.open, ShardWriter._write

    def watched(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if "/c/0/" in str(file) and ("exponent" in str(file) or "sign_mantissa" in str(file)):
            opened.append((Path(file).relative_to(tmp_path / "c/partial/00000000-0000").as_posix(), mode))
        return real_open(file, mode, *rest, **options)

    def counted(self: ShardWriter, data: Any) -> None:
        name = self._file.name
        written[name] = written.get(name, 0) + memoryview(data).nbytes
        real_write(self, data)

    monkeypatch.setattr(builtins, "open", watched)
    monkeypatch.setattr(ShardWriter, "_write", counted)
    writer = CacheWriter(tmp_path / "c", spec, threads=1)
    for number in range(8):
        writer.add(make.sample(number, 20, spec))
    writer.close()
    monkeypatch.undo()
    (part,) = manifest.list_parts(tmp_path / "c")
    found = manifest.load(part, spec)
    assert found.num_chunks == 10
    assert len(opened) == len(set(opened)) == 2 * 4
    assert {mode for _, mode in opened} == {"xb"}
    assert sorted(written.values()) == sorted(found.files[name].size for name, _ in opened)


@pytest.mark.parametrize(("tokens", "hidden"), [(1_000_000, 8192), (131_073, 8192)])
def test_a_chunk_larger_than_any_compressor_takes_is_refused_with_the_limit(make, tokens, hidden):
    with pytest.raises(ValueError, match=f"the limit is {specs.MAX_CHUNK_BYTES}"):
        make.spec(chunk_tokens=tokens, hidden=hidden)
    assert specs.MAX_CHUNK_BYTES < 2_147_483_631
    make.spec(chunk_tokens=131_072, hidden=8192)


def test_raw_states_of_two_million_tokens_in_six_planes_of_4096_are_98_gigabytes(make):
    spec = make.spec(hidden=4096, layer_ids=(1, 9, 17, 25, 33), num_layers=36)
    assert spec.raw_bytes_per_token * 1000 * 2000 == 98_304_000_000


@pytest.mark.parametrize("number", [0, 7, 30, 61])
def test_out_of_space_at_any_chunk_the_next_run_ends_with_the_same_samples(tmp_path, make, monkeypatch, number):
    spec = make.spec(part_tokens=50)
    wanted = {sample.key: sample for sample in (make.sample(n, 25, spec) for n in range(8))}
    open_cache(tmp_path / "c", spec)
    real, left = ShardWriter.append, [number]

    def append(self: ShardWriter, chunk: Any) -> None:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        real(self, chunk)

    def write_missing() -> None:
        known, writer = stored_keys(tmp_path / "c", spec), CacheWriter(tmp_path / "c", spec, threads=1)
        for key, sample in wanted.items():
            if key not in known:
                writer.add(sample)
        writer.close()

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "append", append)
        with pytest.raises(DiskFull, match=r"could not write: No space left on device") as caught:
            write_missing()
    assert str(tmp_path / "c") in str(caught.value)
    kept = stored_keys(tmp_path / "c", spec)
    assert 0 <= len(kept) < 8
    write_missing()
    stored = samples_of(tmp_path / "c")
    assert stored.keys() == wanted.keys()
    for key, sample in stored.items():
        for field in fields(Sample):
            assert np.array_equal(getattr(sample, field.name), getattr(wanted[key], field.name)), field.name


# --- whole runs


class Stopping(FakeEngine):
    """Fails after so many documents."""

    after = 0

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        yield from super().run(islice(documents, self.after))
        raise RunFailed("stopped")


@pytest.mark.parametrize("after", range(6))
def test_stopped_after_any_number_of_samples_and_continued_each_is_there_once(extract, tmp_path, monkeypatch, after):
    """Neither is one left out where the second run takes over, nor the first one stored again."""
    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "after", after)
        patch.setattr(run_module, "start_engine", Stopping)
        with pytest.raises(RunFailed, match="stopped"):
            extract()
    assert len(list((tmp_path / "cache/parts").iterdir())) <= after
    summary = extract()
    assert summary.samples + summary.already_stored == 6
    reader = CacheReader(tmp_path / "cache")
    assert sorted(reader.read_sample(number).source_row for number in range(reader.num_samples)) == [0, 1, 2, 3, 4, 5]


def test_another_text_under_the_same_file_name_gives_other_samples(extract, tmp_path):
    """Elsewhere what was prepared from a file was found again by the file's name."""
    extract()
    other = [replace_text(row) for row in ROWS]
    extract(other, cache=tmp_path / "other")
    one, two = samples_of(tmp_path / "cache"), samples_of(tmp_path / "other")
    assert len(one) == len(two) == 6
    assert not one.keys() & two.keys()
    summary = extract(other)
    assert (summary.samples, summary.already_stored) == (6, 0)
    assert samples_of(tmp_path / "cache").keys() == one.keys() | two.keys()


def replace_text(row: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(row).replace("question", "problem!"))


def test_a_sample_is_stored_as_it_was_given_though_its_arrays_are_used_again(tmp_path, make):
    """An engine fills one buffer again and again; what was handed over before must not change with it."""
    spec = make.spec(part_tokens=10**6)
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec)
    wanted = [make.sample(number, 20, spec) for number in range(3)]
    buffer = replace(wanted[0], **{name: getattr(wanted[0], name).copy() for name in ("hidden_states", "verifier_last_hidden_states")})
    for sample in wanted:
        buffer.hidden_states[...], buffer.verifier_last_hidden_states[...] = sample.hidden_states, sample.verifier_last_hidden_states
        writer.add(replace(sample, hidden_states=buffer.hidden_states, verifier_last_hidden_states=buffer.verifier_last_hidden_states))
    writer.close()
    stored = samples_of(tmp_path / "c")
    assert all(np.array_equal(stored[sample.key].hidden_states, sample.hidden_states) for sample in wanted)
