"""Faults of caches elsewhere, each with the value that is right here: absence is not data, counts are not believed, handles end."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner

from dflash_cache.cli import main
from dflash_cache.common import spec as specs
from dflash_cache.common.errors import CacheDamaged, InputError
from dflash_cache.common.fingerprint import canonical, digest_bytes
from dflash_cache.common.sample import Sample
from dflash_cache.extract.writer import CacheWriter, open_cache, stored_keys
from dflash_cache.train import reader as reader_module
from dflash_cache.train.loader import RowLoader
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.verify import verify

PART = "parts/00000000-0000"


def loader_of(*caches: Path, **options: Any) -> RowLoader:
    return RowLoader([CacheReader(cache) for cache in caches], **{"layer_ids": None, "row_tokens": 64, "need_verifier": True, "seed": 0} | options)


def edit_manifest(part: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and seal it anew."""
    document = json.loads((part / "zarr.json").read_text())
    body = document["attributes"]["dflash"]
    body.pop("digest")
    change(body)
    body["digest"] = digest_bytes(canonical(body))
    (part / "zarr.json").write_bytes(canonical(document))


def says(command: list[str]) -> tuple[int, str]:
    """(exit code, all that was printed) of a command, which must end by itself and not by an exception of ours."""
    done = CliRunner().invoke(main, command)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "unexpected" not in done.output
    return done.exit_code, done.output


def test_a_deleted_shard_fails_training_and_verification_by_name(write_cache, tmp_path):
    """Zarr reads it as zeros without an error."""
    cache, _, _ = write_cache()
    shard = cache / PART / "hidden_states/sign_mantissa/c/0/1/0"
    shard.unlink()
    assert not zarr.open_group(cache / PART, mode="r")["hidden_states/sign_mantissa"][:, 1].any()
    for command in (["verify", str(cache)], ["train", "--cache", str(cache), "--out", str(tmp_path / "run")]):
        code, text = says(command)
        assert code == 1
        assert "hidden_states/sign_mantissa/c/0/1/0" in text
    assert not (tmp_path / "run").exists()


def test_what_is_zero_throughout_is_whole(tmp_path, make):
    """Zarr leaves chunks of zeros unwritten, so that a count of chunks proves nothing."""
    spec = make.spec()
    open_cache(tmp_path / "c", spec)
    make.target_files(tmp_path / "c", spec)
    base = make.sample(0, 40, spec, prompt=40)
    zeros = replace(
        base,
        hidden_states=np.zeros_like(base.hidden_states),
        verifier_last_hidden_states=np.zeros_like(base.verifier_last_hidden_states),
        input_ids=np.zeros_like(base.input_ids),
        engine_top1=0,
    )
    writer = CacheWriter(tmp_path / "c", spec)
    writer.add(zeros)
    writer.close()
    assert verify(tmp_path / "c", teacher=False).problems == []
    read = CacheReader(tmp_path / "c").read_sample(0)
    assert (read.loss_mask.tolist(), int(read.hidden_states.sum())) == ([0] * 40, 0)


@pytest.mark.parametrize("name", ["cache.json", f"{PART}/zarr.json", "target/files.json", f"{PART}/input_ids/zarr.json"])
def test_metadata_that_lacks_its_last_byte_is_told_in_a_sentence(write_cache, name):
    cache, _, _ = write_cache()
    (cache / name).write_bytes((cache / name).read_bytes()[:-2])  # the newline, where there is one, and the bracket
    code, text = says(["verify", str(cache)])
    assert code == 1
    assert str(cache / name) in text
    assert "Traceback" not in text


def test_who_looks_at_any_moment_of_a_commit_finds_whole_parts_only(write_cache, make, monkeypatch):
    """Before and after whatever makes something durable or visible, the cache is that of before the commit or that of after it."""
    cache, spec, samples = write_cache(lengths=[5])
    seen: list[int] = []

    def look() -> None:
        reader = CacheReader(cache)
        seen.append(reader.num_samples)
        assert reader.read_sample(0).source_row == samples[0].source_row
        assert reader.read_sample(reader.num_samples - 1).source_row == reader.num_samples - 1

    def looking(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            look()
            done = call(*arguments, **options)
            look()
            return done

        return wrapped

    writer = CacheWriter(cache, spec, threads=1)
    monkeypatch.setattr(os, "fsync", looking(lambda handle: None))
    monkeypatch.setattr(os, "rename", looking(os.rename))
    monkeypatch.setattr(os, "replace", looking(os.replace))
    for number in (1, 2):
        writer.add(make.sample(number, 5, spec))
        look()
        writer.publish()
    assert len(seen) > 100
    assert seen == sorted(seen)
    assert set(seen) == {1, 2, 3}


FIELDS = ["fingerprint", "part", "tokens", "samples", "supervised_tokens", "chunk_tokens", "sources", "files", "digest"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_manifest_without_a_field_is_refused_and_nothing_stands_in_for_it(write_cache, field):
    cache, spec, _ = write_cache()
    document = json.loads((cache / PART / "zarr.json").read_text())
    assert sorted(document["attributes"]["dflash"]) == sorted(FIELDS)
    if field == "digest":
        del document["attributes"]["dflash"]["digest"]
        (cache / PART / "zarr.json").write_bytes(canonical(document))
    else:
        edit_manifest(cache / PART, lambda body: body.pop(field))
    for use in (CacheReader, lambda path: stored_keys(path, spec)):
        with pytest.raises(CacheDamaged, match="manifest"):
            use(cache)


def test_a_file_that_the_manifest_does_not_list_is_not_taken_for_empty(write_cache):
    cache, spec, _ = write_cache()
    shard = "hidden_states/exponent/c/0/2/0"
    edit_manifest(cache / PART, lambda body: body["files"].pop(shard))
    for use in (CacheReader, lambda path: stored_keys(path, spec)):
        with pytest.raises(CacheDamaged, match=shard):
            use(cache)


def test_counts_are_measured_again_by_verification(write_cache):
    """Whatever the manifest says, sealed rightly: its sums are those of the data, part by part."""
    cache, _, samples = write_cache(lengths=[10] * 7, part_tokens=30)
    reader = CacheReader(cache)
    assert [part.manifest.samples for part in reader.parts] == [3, 3, 1]
    assert [part.manifest.tokens for part in reader.parts] == [30, 30, 10]
    assert reader.num_samples == len(samples)
    for field in ("samples", "tokens", "supervised_tokens"):
        intact = (cache / PART / "zarr.json").read_bytes()
        edit_manifest(cache / PART, lambda body, field=field: body.update({field: body[field] + 1}))
        (problem, *_) = verify(cache, teacher=False).problems
        assert problem.entry == PART, field
        (cache / PART / "zarr.json").write_bytes(intact)
    assert verify(cache, teacher=False).problems == []


@pytest.mark.parametrize("most", [1, 5, 128])
def test_eight_threads_read_shards_of_many_chunks_through_one_reader_and_all_are_right(write_cache, monkeypatch, most):
    """Some readers of sharded arrays compute wrong checksums, or give another's bytes, when they are asked several things at once."""
    monkeypatch.setattr(reader_module, "MAX_OPEN_SHARDS", most)
    cache, _, samples = write_cache(lengths=np.random.default_rng(0).integers(1, 90, 24).tolist(), part_tokens=400, chunk_tokens=8)
    reader = CacheReader(cache)
    order = np.random.default_rng(1).integers(0, len(samples), 160).tolist()
    with ThreadPoolExecutor(8) as pool:
        for number, read in zip(order, pool.map(reader.read_sample, order), strict=True):
            for name in Sample.__dataclass_fields__:
                assert np.array_equal(getattr(read, name), getattr(samples[number], name)), name


def test_a_process_forked_after_reading_reads_on(write_cache):
    """Where a codec keeps threads and locks of its own, the child of a process that has read waits for ever."""
    cache, _, samples = write_cache(lengths=[30, 40, 50])
    loader = loader_of(cache)
    assert sum(batch.num_tokens for batch in loader.epoch(0)) == 120
    reader = CacheReader(cache)
    reader.read_sample(0)
    for _ in range(10):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            mine = CacheReader(cache)
            right = all(np.array_equal(one.read_sample(2).hidden_states, samples[2].hidden_states) for one in (reader, mine))
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_stored_patterns_come_out_as_the_numbers_that_they_mean(tmp_path, make):
    """0x3f80 is one, not 16256; minus zero, the smallest number, infinity and a NaN keep their bits."""
    spec = make.spec(layer_ids=(0,))
    patterns = [0x0000, 0x8000, 0x3F80, 0x7F80, 0x7FC1, 0x0001, 0xC049, 0x7F7F]
    base = make.sample(0, 3, spec)
    states = np.array([patterns] * 3, np.uint16)
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec)
    writer.add(replace(base, hidden_states=states[:, None], verifier_last_hidden_states=states))
    writer.close()
    (batch,) = loader_of(tmp_path / "c").epoch(0)
    numbers = batch.features[0, 0].float().tolist()
    assert numbers[2] == 1.0
    assert numbers[6] == -3.140625
    assert numbers[3] == float("inf")
    assert numbers[4] != numbers[4]
    assert 0 < numbers[5] < 1e-40
    for found in (batch.features[:3, 0], batch.verifier[:3]):
        assert (found.view(torch.int16).numpy().view(np.uint16) == states).all()


@pytest.fixture
def few_handles() -> Any:
    """This process may open 256 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_epoch_over_many_caches_keeps_to_the_handles_of_the_process(write_cache, tmp_path, few_handles):
    """Each cache alone stays far below the limit; together they must as well, and leave some for the rest of the program."""
    one, _, _ = write_cache(lengths=[20] * 20, part_tokens=60)
    caches = [one, *(Path(shutil.copytree(one, tmp_path / f"copy{number}")) for number in range(11))]
    before = most = len(os.listdir("/proc/self/fd"))
    loader, tokens = loader_of(*caches), 0
    for batch in loader.epoch(0):
        tokens += batch.num_tokens
        most = max(most, len(os.listdir("/proc/self/fd")))
    assert tokens == 12 * 400
    assert most - before < few_handles * 5 // 8
    loader.close()


def test_what_a_reader_knows_of_a_sample_is_numbers_in_arrays_and_few_bytes(write_cache):
    """An index of Python objects is copied into every process that touches it, page by page."""
    cache, _, _ = write_cache(lengths=[1] * 300, part_tokens=400)
    reader = CacheReader(cache)
    per_sample = [value for value in vars(reader).values() if hasattr(value, "__len__") and len(value) >= 300]
    assert len(per_sample) == 3
    assert all(isinstance(value, np.ndarray) and value.dtype != object for value in per_sample)
    assert sum(value.nbytes for value in per_sample) <= 24 * 300


def test_a_cache_of_a_later_format_is_refused_with_both_versions(write_cache):
    cache, _, _ = write_cache()
    document = json.loads((cache / "cache.json").read_text())
    document["settings"]["format_version"] = 2
    (cache / "cache.json").write_text(json.dumps(document))
    with pytest.raises(InputError) as caught:
        CacheReader(cache)
    assert "version 2" in str(caught.value)
    assert "version 1" in str(caught.value)


def test_settings_of_the_first_program_have_their_fingerprint_still_and_may_be_continued(tmp_path):
    """A setting that came later must not make every older cache a damaged one, or one of other settings."""
    golden = Path(__file__).parents[1] / "golden/cache-v1"
    found = specs.load(golden)
    specs.save(tmp_path, found)
    documents = [json.loads((folder / "cache.json").read_text()) for folder in (golden, tmp_path)]
    assert documents[0]["settings"] == documents[1]["settings"]
    today = specs.CacheSpec(settings=found.settings)
    assert today.fingerprint == found.fingerprint == documents[0]["fingerprint"]
    specs.check_same_settings(golden, found, today)
    text = found.settings.text.model_copy(update={"overlong": "truncate"})
    other = specs.CacheSpec(settings=found.settings.model_copy(update={"text": text}))
    assert other.fingerprint != found.fingerprint
    with pytest.raises(InputError, match=r"text\.overlong: the cache has 'reject', this run has 'truncate'"):
        specs.check_same_settings(golden, found, other)
    specs.save(tmp_path, other)
    assert specs.load(tmp_path).settings == other.settings
