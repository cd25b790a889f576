"""`dflash verify --repair`: what is damaged is moved, never deleted, and the same extraction fills exactly what is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
from click.testing import CliRunner
from fake_engine import FakeEngine

from dflash_cache.cli import main
from dflash_cache.common.errors import CacheDamaged, InputError
from dflash_cache.common.lock import only_writer
from dflash_cache.common.sample import Sample
from dflash_cache.extract import run as run_module
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.run import ExtractSummary, run
from dflash_cache.extract.writer import CacheWriter
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.repair import ranges, repair
from dflash_cache.train.verify import verify

ROWS = [tiny.chat(f"question {number}", "answer " * (number + 1)) for number in range(8)] + ["broken"]


@pytest.fixture
def extract(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ExtractSummary]:
    """The same command each time."""
    monkeypatch.setattr(run_module, "start_engine", FakeEngine)
    monkeypatch.setattr("dflash_cache.train.verify._check_teacher", lambda *_: None)  # the fake engine's tokens are not the head's
    monkeypatch.setattr("dflash_cache.train.verify._compare_with_data", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    tiny.write_jsonl(tmp_path / "data.jsonl", ROWS)
    config = ExtractConfig(
        model=str(tiny_llama),
        data=("data.jsonl",),
        cache=tmp_path / "cache",
        engine="transformers",
        max_length=256,
        part_tokens=150,
        chunk_tokens=32,
    )
    return lambda: run(config)


@pytest.fixture
def cache(extract: Callable[[], ExtractSummary], tmp_path: Path) -> Path:
    extract()
    assert len(list((tmp_path / "cache/parts").iterdir())) >= 3
    return tmp_path / "cache"


def samples(cache: Path) -> dict[bytes, Sample]:
    reader = CacheReader(cache)
    return {sample.key: sample for sample in map(reader.read_sample, range(reader.num_samples))}


def rows(cache: Path, part: str) -> list[int]:
    reader = CacheReader(cache)
    number = [found.path.name for found in reader.parts].index(part)
    return sorted(reader.column(number, "source_row").tolist())


def flip(path: Path, byte: int = 7) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def assert_filled(cache: Path, whole: dict[bytes, Sample], extract: Callable[[], ExtractSummary], missing: int) -> None:
    """The same command stores `missing` samples and nothing else, and the cache is what it was."""
    summary = extract()
    assert (summary.samples, summary.already_stored) == (missing, len(whole) - missing)
    now = samples(cache)
    assert now.keys() == whole.keys()
    for key, sample in now.items():
        assert np.array_equal(sample.hidden_states, whole[key].hidden_states)
        assert np.array_equal(sample.verifier_last_hidden_states, whole[key].verifier_last_hidden_states)
    assert verify(cache, teacher=False).problems == []


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a flipped bit of a state": lambda part: flip(part / "hidden_states/sign_mantissa/c/0/1/0"),
    "a missing shard": lambda part: (part / "hidden_states/exponent/c/0/1/0").unlink(),
    "an empty mask": lambda part: (part / "loss_mask/c/0").write_bytes(b""),
    "metadata": lambda part: flip(part / "hidden_states/exponent/zarr.json"),
    "a changed list of checksums": lambda part: flip(part / "chunk_crc32c/c/0/0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_part_is_moved_its_rows_are_told_and_the_next_extract_fills_them(cache, extract, damage):
    whole, lost = samples(cache), rows(cache, "00000001-0000")
    DAMAGE[damage](cache / "parts/00000001-0000")
    report = repair(cache)
    assert report.ok
    assert [(moved.entry, moved.to, moved.samples) for moved in report.moved] == [("parts/00000001-0000", "quarantine/00000001-0000", len(lost))]
    assert report.extract_again == {"data.jsonl": lost}
    assert report.unknown_parts == 0
    assert (cache / "quarantine/00000001-0000/zarr.json").is_file()
    assert len(samples(cache)) == len(whole) - len(lost)
    assert_filled(cache, whole, extract, len(lost))


@pytest.mark.parametrize("name", ["zarr.json", "source_row/c/0", "sample_key/c/0/0"])
def test_a_part_that_no_longer_says_its_rows_is_moved_and_filled_all_the_same(cache, extract, name):
    whole, lost = samples(cache), rows(cache, "00000001-0000")
    flip(cache / "parts/00000001-0000" / name)
    report = repair(cache)
    assert (report.ok, report.extract_again, report.unknown_parts) == (True, {}, 1)
    assert "whatever was in 1 parts that cannot be read any more" in report.to_text()
    assert_filled(cache, whole, extract, len(lost))


def test_damage_of_several_parts_and_of_the_target_and_of_the_rejects_at_once(cache, extract):
    whole = samples(cache)
    lost = sorted(rows(cache, "00000000-0000") + rows(cache, "00000002-0000"))
    flip(cache / "parts/00000000-0000/input_ids/c/0")
    shutil.rmtree(cache / "parts/00000002-0000/engine_top1")
    flip(cache / "target/config.json")
    (cache / "rejects.jsonl").write_text("?")
    report = repair(cache)
    assert {moved.entry for moved in report.moved} == {"parts/00000000-0000", "parts/00000002-0000", "target", "rejects.jsonl"}
    assert report.extract_again == {"data.jsonl": lost}
    assert sorted(path.name for path in (cache / "quarantine").iterdir()) == ["00000000-0000", "00000002-0000", "rejects.jsonl", "target"]
    assert_filled(cache, whole, extract, len(lost))
    assert verify(cache).problems == []  # target/ is there again
    assert len((cache / "rejects.jsonl").read_text().splitlines()) == 1


def test_a_name_that_is_taken_in_the_quarantine_gets_a_number(cache, extract):
    whole, last = samples(cache), max(path.name for path in (cache / "parts").iterdir())
    for expected in (last, f"{last}.1", f"{last}.2"):
        lost = rows(cache, last)
        flip(cache / "parts" / last / "input_ids/c/0")
        (moved,) = repair(cache).moved
        assert moved.to == f"quarantine/{expected}"
        assert_filled(cache, whole, extract, len(lost))  # the number of the part is free again and is taken


def test_what_is_no_part_is_moved_too_and_a_link_is_not_followed(cache, extract, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("x")
    (cache / "parts/00000009-0000").symlink_to(tmp_path / "outside")
    (cache / "parts/notes.txt").write_text("x")
    report = repair(cache)
    assert report.ok
    assert sorted(moved.to for moved in report.moved) == ["quarantine/00000009-0000", "quarantine/notes.txt"]
    assert (tmp_path / "outside/file").read_text() == "x"
    assert (cache / "quarantine/00000009-0000").is_symlink()
    assert verify(cache, teacher=False).problems == []


def test_a_sample_that_a_whole_part_holds_too_is_not_to_be_extracted_again(cache, extract):
    whole = samples(cache)
    reader = CacheReader(cache)
    twice = reader.read_sample(0)
    writer = CacheWriter(cache, reader.spec)
    writer.add(twice)
    writer.close()
    report = repair(cache)
    assert [moved.samples for moved in report.moved] == [1]
    assert report.extract_again == {}
    assert_filled(cache, whole, extract, 0)


def test_a_whole_cache_is_left_as_it_is(cache):
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    report = repair(cache)
    assert (report.ok, report.moved, report.extract_again) == (True, [], {})
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_cache_json_cannot_be_repaired_and_an_equal_one_mends_the_cache(cache, extract, tmp_path):
    flip(cache / "cache.json", byte=200)
    with pytest.raises(CacheDamaged, match="it cannot be repaired"):
        repair(cache)
    (cache / "cache.json").write_text("")
    with pytest.raises(CacheDamaged, match="it cannot be repaired, but an equal one can be had"):
        repair(cache)
    (cache / "cache.json").unlink()
    with pytest.raises(CacheDamaged, match="is missing, though there are parts"):
        repair(cache)
    assert not (cache / "quarantine").exists()
    cache.rename(tmp_path / "old")  # as the message says: the same settings into a new folder, and its cache.json back here
    extract()
    shutil.copy(cache / "cache.json", tmp_path / "old/cache.json")
    assert verify(tmp_path / "old", teacher=False).problems == []


def test_while_an_extraction_writes_nothing_is_repaired(cache):
    with only_writer(cache), pytest.raises(InputError, match="another extraction"):
        repair(cache)


def test_the_command_tells_the_rows_as_text_and_as_json(cache, extract):
    lost = rows(cache, "00000001-0000")
    flip(cache / "parts/00000001-0000/input_ids/c/0")
    done = CliRunner().invoke(main, ["verify", str(cache)])
    assert done.exit_code == 1
    assert f"`dflash verify --repair {cache}` sets what is damaged aside" in done.stdout
    done = CliRunner().invoke(main, ["verify", "--repair", str(cache), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["ok"] is True
    assert document["extract_again"] == {"data.jsonl": lost}
    assert document["moved"][0]["entry"] == "parts/00000001-0000"
    assert document["found"]["ok"] is False
    extract()
    flip(cache / "parts/00000002-0000/input_ids/c/0")
    lost = rows(cache, "00000002-0000")
    text = CliRunner().invoke(main, ["verify", "--repair", str(cache)]).stdout
    assert f"to extract again from data.jsonl: {len(lost)} rows: {ranges(lost)}\n" in text
    assert "moved parts/00000002-0000" in text
    assert "run the same `dflash extract` command again" in text


def test_problems_that_moving_does_not_mend_are_left_and_fail(write_cache):
    cache, _, _ = write_cache()  # the engine's tokens are noise, so fidelity fails; no single part is to blame
    done = CliRunner().invoke(main, ["verify", "--repair", str(cache)])
    assert done.exit_code == 1
    assert "not repaired" in done.stdout
    assert not (cache / "quarantine").exists()


def test_ranges_of_rows():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([4]) == "4"
    assert ranges(list(range(0, 50, 2))).endswith("38 and 5 more runs (--json lists all)")
