"""A cache grows: more data, more rows of the same data; what is stored is never stored again, and every row has one fate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
from fake_engine import FakeEngine, ruler

from dflash_cache.common.errors import InputError
from dflash_cache.common.lock import only_writer
from dflash_cache.extract import run as run_module
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.rejects import Reject, load_rejects
from dflash_cache.extract.run import ExtractSummary, run
from dflash_cache.extract.writer import CacheWriter
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.verify import verify

A = [tiny.chat(f"a {number}", "answer " * (number + 1)) for number in range(6)]
B = [tiny.chat(f"b {number}", "answer " * (number + 1)) for number in range(4)]
Extract = Callable[..., ExtractSummary]


@pytest.fixture
def extract(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extract:
    """extract({"a.jsonl": rows, ...}, **fields) with the fake engine into tmp_path/cache."""
    monkeypatch.setattr(run_module, "start_engine", FakeEngine)
    monkeypatch.chdir(tmp_path)

    def build(data: dict[str, list[object]], **fields: Any) -> ExtractSummary:
        for name, rows in data.items():
            tiny.write_jsonl(tmp_path / name, rows)
        given = {"model": str(tiny_llama), "data": tuple(data), "cache": tmp_path / "cache", "engine": "transformers", "max_length": 256}
        return run(ExtractConfig(**(given | {"part_tokens": 150, "chunk_tokens": 32} | fields)))

    return build


def rows_of(cache: Path) -> list[tuple[str, int]]:
    """(source, row) of every sample, after checking that its states are its own."""
    reader = CacheReader(cache)
    rows = []
    for number in range(reader.num_samples):
        sample = reader.read_sample(number)
        states = ruler(sample.key, len(sample), len(reader.spec.layer_ids) + 1, reader.spec.hidden_size)
        assert np.array_equal(sample.hidden_states, states[:, :-1])
        assert np.array_equal(sample.verifier_last_hidden_states, states[:, -1])
        rows.append((sample.source, sample.source_row))
    assert verify(cache, teacher=False).problems == []
    return sorted(rows)


def fates(summary: ExtractSummary) -> tuple[int, int, int, int]:
    return summary.rows, summary.samples, summary.already_stored, summary.rejects


def test_more_data_adds_its_samples_and_leaves_the_parts_that_are_there(extract: Extract, tmp_path: Path):
    assert fates(extract({"a.jsonl": A})) == (6, 6, 0, 0)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/parts").rglob("*") if path.is_file()}
    assert fates(extract({"a.jsonl": A, "b.jsonl": B})) == (10, 4, 6, 0)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert rows_of(tmp_path / "cache") == [("a.jsonl", n) for n in range(6)] + [("b.jsonl", n) for n in range(4)]


def test_other_data_alone_adds_to_the_same_cache(extract: Extract, tmp_path: Path):
    extract({"a.jsonl": A})
    assert fates(extract({"b.jsonl": B})) == (4, 4, 0, 0)
    assert len(rows_of(tmp_path / "cache")) == 10


def test_a_row_that_an_earlier_run_stored_from_other_data_is_counted_as_already_stored(extract: Extract, tmp_path: Path):
    extract({"a.jsonl": A})
    assert fates(extract({"b.jsonl": [A[2], *B, A[5]]})) == (6, 4, 2, 0)
    assert rows_of(tmp_path / "cache") == [("a.jsonl", n) for n in range(6)] + [("b.jsonl", n) for n in (1, 2, 3, 4)]


def test_one_row_in_two_data_sets_of_one_run_is_stored_once_and_the_other_is_listed(extract: Extract, tmp_path: Path):
    assert fates(extract({"a.jsonl": A, "b.jsonl": [B[0], A[3]]})) == (8, 7, 0, 1)
    assert load_rejects(tmp_path / "cache") == [Reject("b.jsonl", 1, "duplicate of row 3 of a.jsonl")]


def test_rejects_of_earlier_data_stay_listed(extract: Extract, tmp_path: Path):
    extract({"a.jsonl": [*A, "broken", ""]})
    extract({"b.jsonl": [*B, {"messages": None}]})
    assert [(reject.source, reject.row) for reject in load_rejects(tmp_path / "cache")] == [("a.jsonl", 6), ("a.jsonl", 7), ("b.jsonl", 4)]
    extract({"b.jsonl": [*B, B[1]]})
    assert load_rejects(tmp_path / "cache")[2] == Reject("b.jsonl", 4, "duplicate of row 1")


def test_a_larger_limit_adds_the_rows_between(extract: Extract, tmp_path: Path):
    data = {"a.jsonl": ["broken", *A], "b.jsonl": B}
    assert fates(extract(data, limit=3)) == (3, 2, 0, 1)
    assert fates(extract(data, limit=9)) == (9, 6, 2, 1)
    assert fates(extract(data)) == (11, 2, 8, 1)
    assert fates(extract(data, limit=3)) == (3, 0, 2, 1)
    assert rows_of(tmp_path / "cache") == [("a.jsonl", n) for n in range(1, 7)] + [("b.jsonl", n) for n in range(4)]
    assert [(reject.source, reject.row) for reject in load_rejects(tmp_path / "cache")] == [("a.jsonl", 0)]


def test_rows_appended_to_a_file_are_added(extract: Extract, tmp_path: Path):
    extract({"a.jsonl": A})
    assert fates(extract({"a.jsonl": [*A, *B]})) == (10, 4, 6, 0)
    assert rows_of(tmp_path / "cache") == [("a.jsonl", n) for n in range(10)]


def test_what_a_killed_run_left_half_prepared_is_cleared_and_no_other_file(extract: Extract, tmp_path: Path):
    cache = tmp_path / "cache"
    extract({"a.jsonl": A})
    leftovers = [cache / f".{name}.4242.0123abcd" for name in ("cache.json", "rejects.jsonl", "target")]
    leftovers[0].write_text("{")
    leftovers[1].write_text("{")
    (leftovers[2] / "deep").mkdir(parents=True)
    (cache / "partial/00000009-0007/hidden_states").mkdir(parents=True)
    mine = [cache / name for name in (".notes", "notes.4242.0123abcd", ".mine.4242.0123abcd")]
    for path in mine:
        path.write_text("x")
    extract({"a.jsonl": A, "b.jsonl": B})
    assert not any(path.exists() for path in leftovers)
    assert list((cache / "partial").iterdir()) == []
    assert all(path.exists() for path in mine)


def test_a_new_cache_may_begin_where_a_killed_run_left_only_a_sibling_of_cache_json(extract: Extract, tmp_path: Path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/.cache.json.4242.0123abcd").write_text("{")
    assert fates(extract({"a.jsonl": A})) == (6, 6, 0, 0)


def test_a_writer_that_outlived_its_run_is_waited_for_and_then_told_of(extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A vLLM worker may publish a part after its parent was killed; the next run has to see that part before it counts what is stored."""
    cache = tmp_path / "cache"
    extract({"a.jsonl": A})
    orphan = CacheWriter(cache, CacheReader(cache).spec)
    monkeypatch.setattr("dflash_cache.common.lock.PATIENCE_SECONDS", 0.1)
    with pytest.raises(InputError, match="a writer of an earlier extraction"), only_writer(cache):
        pass
    orphan.abandon()
    assert fates(extract({"b.jsonl": B})) == (4, 4, 0, 0)


def test_a_damaged_list_of_rejects_is_told_before_any_work(extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    extract({"a.jsonl": [*A, "broken"]})
    (tmp_path / "cache/rejects.jsonl").write_text('{"source": "a.jsonl"')
    monkeypatch.setattr(run_module, "start_engine", lambda job: pytest.fail("the engine was started"))
    with pytest.raises(Exception, match=r"rejects\.jsonl line 1: is no reject"):
        extract({"a.jsonl": A, "b.jsonl": B})
