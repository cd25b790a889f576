"""However many processes there are, and whichever of them is killed when, the cache holds the samples of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
from fake_engine import FakeEngine
from forked import ROWS, Server, assert_same_cache, extraction, samples_by_key

from dflash_cache.common.errors import DiskFull, RunFailed
from dflash_cache.extract import run as run_module
from dflash_cache.extract import workers as workers_module
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.engine import Document, EngineJob, Outcome, WriterCounts
from dflash_cache.extract.run import ExtractSummary, run


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def events(cache: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cache / "extract.log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("workers", [2, 4])
def test_several_processes_store_the_samples_of_one(
    server: Server, whole_cache: Path, tiny_llama: Path, rows_file: Path, tmp_path: Path, workers: int
):
    job = extraction(tiny_llama, rows_file, tmp_path / "cache", pause=0.004)
    job["fields"]["workers"] = workers
    assert server.do(**job) == [0]
    assert_same_cache(tmp_path / "cache", whole_cache)
    writers = {path.name.split("-")[1] for path in (tmp_path / "cache/parts").iterdir()}
    assert writers <= {f"{number:04d}" for number in range(workers)}
    assert len(writers) > 1
    summary = events(tmp_path / "cache")[-1]["summary"]
    assert (summary["rows"], summary["samples"]) == (len(ROWS), len(samples_by_key(whole_cache)))
    assert not [event for event in events(tmp_path / "cache") if event["event"] == "worker_died"]


@pytest.mark.parametrize("workers", [2, 4])
def test_processes_killed_at_random_moments_are_replaced_and_nothing_is_lost_or_stored_twice(
    server: Server, whole_cache: Path, tiny_llama: Path, rows_file: Path, tmp_path: Path, workers: int
):
    moments, deaths = random.Random(workers), 0
    for number in range(6):
        cache = tmp_path / f"cache{number}"
        job = extraction(tiny_llama, rows_file, cache, pause=0.012)
        job["fields"]["workers"] = workers
        (pid,) = server.start(**job)
        for _ in range(2):
            time.sleep(moments.uniform(0.0, 0.5))
            alive = children(pid)
            if alive:
                os.kill(moments.choice(alive), signal.SIGKILL)
        assert server.codes() == [0]
        assert_same_cache(cache, whole_cache)
        deaths += sum(event["event"] == "worker_died" for event in events(cache))
    assert deaths > 3


def test_when_the_run_is_killed_its_processes_end_and_the_next_run_completes_the_cache(
    server: Server, whole_cache: Path, tiny_llama: Path, rows_file: Path, tmp_path: Path
):
    moments = random.Random(1)
    for number in range(4):
        cache = tmp_path / f"cache{number}"
        job = extraction(tiny_llama, rows_file, cache, pause=0.012)
        job["fields"]["workers"] = 2
        (pid,) = server.start(**job)
        time.sleep(moments.uniform(0.2, 0.8))
        os.kill(pid, signal.SIGKILL)
        assert server.codes()[0] in (0, -signal.SIGKILL)
        assert server.do(**job) == [0]
        assert_same_cache(cache, whole_cache)


def test_ranks_at_the_same_time_fill_one_cache_together(server: Server, whole_cache: Path, tiny_llama: Path, rows_file: Path, tmp_path: Path):
    for number, workers in ((0, 1), (1, 1), (2, 2)):
        cache = tmp_path / f"cache{number}"
        job = extraction(tiny_llama, rows_file, cache, pause=0.004, ranks=3)
        job["fields"]["workers"] = workers
        assert server.do(**(job | {"do": "ranks"})) == [0, 0, 0]
        assert_same_cache(cache, whole_cache)
        finished = [event["summary"] for event in events(cache) if event["event"] == "finished"]
        assert sum(summary["samples"] for summary in finished) == len(samples_by_key(whole_cache))
        for summary in finished:
            fates = [summary[name] for name in ("samples", "rejects", "already_stored", "left_to_others")]
            assert sum(fates) == len(ROWS)


def test_a_killed_rank_is_completed_by_the_same_command_while_the_others_stay(
    server: Server, whole_cache: Path, tiny_llama: Path, rows_file: Path, tmp_path: Path
):
    moments = random.Random(2)
    for number in range(3):
        cache = tmp_path / f"cache{number}"
        job = extraction(tiny_llama, rows_file, cache, pause=0.008, ranks=3) | {"do": "ranks"}
        pids = server.start(**job)
        time.sleep(moments.uniform(0.05, 0.5))
        os.kill(moments.choice(pids), signal.SIGKILL)
        assert set(server.codes()) <= {0, -signal.SIGKILL}
        assert server.do(**job) == [0, 0, 0]
        assert_same_cache(cache, whole_cache)


def test_one_rank_alone_stores_its_share_and_says_what_it_left(server: Server, tiny_llama: Path, rows_file: Path, tmp_path: Path):
    stored: set[bytes] = set()
    for rank in range(3):
        cache = tmp_path / f"cache{rank}"
        job = extraction(tiny_llama, rows_file, cache)
        job["fields"] |= {"rank": rank, "world_size": 3}
        assert server.do(**job) == [0]
        mine = samples_by_key(cache).keys()
        assert not stored & mine
        stored |= mine
        assert {path.name.split("-")[1] for path in (cache / "parts").iterdir()} == {f"{rank:04d}"}
    assert len(stored) == sum(1 for _ in ROWS) - 4 - 7  # four rows that cannot be used, seven whose states are not finite


# ---- in this process, with engines that fail


class Dying(FakeEngine):
    """Dies at its first document."""

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        next(iter(documents))
        os.kill(os.getpid(), signal.SIGKILL)
        yield []


class DyingWith(FakeEngine):
    """Dies when it meets row 3."""

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        for document in documents:
            if document.source_row == 3:
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
            yield [self._store(document)]


class Raising(FakeEngine):
    """Has an error of its own at its second document."""

    error: Exception = RunFailed("vLLM died: out of memory", place="vLLM")

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        for number, document in enumerate(documents):
            if number == 1:
                raise self.error
            yield [self._store(document)]


class NeverStarting(FakeEngine):
    """Cannot start."""

    def __init__(self, job: EngineJob) -> None:
        raise RunFailed("vLLM could not start: no memory", place="vLLM")


class DyingOnce(FakeEngine):
    """The first of the processes dies at its end, once: with all its samples published, or with some of them pending."""

    flag: Path
    publishes = False

    def close(self, *, publish: bool) -> WriterCounts:
        if self.job.writer_id == 0 and not self.flag.exists():
            if self.publishes:
                super().close(publish=True)
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().close(publish=publish)


class DyingTwice(DyingOnce):
    """Dies at its end with samples pending; the process in its place, which alone is to repeat them, dies before it is ready."""

    def __init__(self, job: EngineJob) -> None:
        again = self.flag.with_name("again")
        if job.writer_id == 0 and self.flag.exists() and not again.exists():
            again.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(job)


class StuckAtSecond(FakeEngine):
    """The second of the processes takes two documents and is silent."""

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        if self.job.writer_id != 1:
            yield from super().run(documents)
            return
        iterator = iter(documents)
        for _ in range(2):
            next(iterator)
        time.sleep(3600)


@pytest.fixture
def extract(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """extract(engine, **fields) with two processes."""
    monkeypatch.setattr(workers_module, "START_METHOD", "fork")
    data = tiny.write_jsonl(tmp_path / "data.jsonl", [tiny.chat(f"question {number}", "answer " * (number + 1)) for number in range(40)])

    def build(engine: type, make_check: Any = None, **fields: Any) -> ExtractSummary:
        monkeypatch.setattr(run_module, "start_engine", engine)
        given = {"model": str(tiny_llama), "data": (str(data),), "cache": tmp_path / "cache", "engine": "transformers", "max_length": 600}
        return run(ExtractConfig(**(given | {"workers": 2, "part_tokens": 400, "chunk_tokens": 32} | fields)), make_check)

    return build


@pytest.mark.parametrize("publishes", [True, False])
def test_a_process_that_dies_at_its_very_end_holds_nobody_up(extract: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publishes: bool):
    monkeypatch.setattr(DyingOnce, "flag", tmp_path / "died", raising=False)
    monkeypatch.setattr(DyingOnce, "publishes", publishes)
    monkeypatch.setattr(FakeEngine, "pause_seconds", 0.01)
    assert extract(DyingOnce, part_tokens=100_000).samples == 40
    assert len(samples_by_key(tmp_path / "cache")) == 40
    (died,) = [event for event in events(tmp_path / "cache") if event["event"] == "worker_died"]
    assert (died["documents_to_repeat"] == 0) == publishes


def test_what_waits_for_a_process_is_done_when_that_one_dies_too_before_it_has_begun(extract: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DyingTwice, "flag", tmp_path / "died", raising=False)
    assert extract(DyingTwice).samples == 40
    assert (tmp_path / "again").exists()
    assert len(samples_by_key(tmp_path / "cache")) == 40


def test_three_deaths_without_a_finished_document_fail_the_run_with_the_last_error(extract: Any):
    with pytest.raises(RunFailed, match="died 3 times without finishing a document") as error:
        extract(Dying)
    assert "was killed by signal 9" in str(error.value.found)


def test_a_document_with_which_processes_die_again_and_again_is_named(extract: Any):
    with pytest.raises(RunFailed, match=r"(died 5 times with the same documents|died 3 times without)"):
        extract(DyingWith)


def test_the_error_of_an_engine_that_keeps_failing_is_told(extract: Any, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RunFailed) as error:
        extract(Raising)
    assert "vLLM died: out of memory" in str(error.value.found)


def test_a_full_disk_ends_the_run_at_once(extract: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Raising, "error", DiskFull("could not write: No space left on device", place="there"))
    with pytest.raises(DiskFull, match="No space left"):
        extract(Raising)
    assert not list((tmp_path / "cache/partial").iterdir())


def test_an_engine_that_cannot_start_is_not_tried_again(extract: Any, tmp_path: Path):
    with pytest.raises(RunFailed, match="vLLM could not start: no memory"):
        extract(NeverStarting)
    assert not [event for event in events(tmp_path / "cache") if event["event"] == "worker_died"]


def test_a_process_that_stalls_is_noticed_while_others_work(extract: Any):
    with pytest.raises(RunFailed, match="no document has finished for") as error:
        extract(StuckAtSecond, stall_seconds=1.0)
    assert "data.jsonl row " in str(error.value.found)


def test_wrong_states_of_any_process_stop_all_before_anything_is_published(extract: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeEngine, "pause_seconds", 0.02)
    with pytest.raises(RunFailed, match="samples disagree"):
        extract(FakeEngine, lambda cache: lambda bits, top1: np.zeros(len(top1), bool), part_tokens=100_000)
    assert not list((tmp_path / "cache/parts").iterdir())
    assert not list((tmp_path / "cache/partial").iterdir())


def test_processes_may_be_started_afresh_as_on_a_gpu(extract: Any, monkeypatch: pytest.MonkeyPatch):
    """With `spawn` everything has to cross as a message; the engine is the real one of transformers."""
    monkeypatch.setattr(workers_module, "START_METHOD", "spawn")
    summary = extract(run_module.start_engine, limit=6)
    assert (summary.samples, summary.rejects) == (6, 0)
