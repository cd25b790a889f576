"""Killed anywhere, an extraction loses nothing that was committed and the same command again makes the same cache.

The real `run.run` with a fake engine, in children of a process that has imported everything once (`fork_server`).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny

from dflash_cache.common.sample import Sample
from dflash_cache.extract.writer import open_cache
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.verify import verify

KILLS = 30
ROWS = [tiny.chat(f"question {number}", "answer " * (number % 9 + 1)) for number in range(60)]
ROWS[10:10] = ["{broken", "", ROWS[3], tiny.chat("long", "x" * 300)]
REJECT_EVERY = 9


class Server:
    """Gives jobs to the fork server."""

    def __init__(self, *arguments: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), *map(str, arguments)]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # it forks, and threads do not survive that
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, env=one_thread)
        assert self.answer() == "ready"

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr and self.process.stderr.read()
        return json.loads(line)

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def start(self, **job: Any) -> list[int]:
        self.send(json.dumps(job))
        return self.answer()["pids"]

    def codes(self) -> list[int]:
        self.send("")
        return self.answer()["codes"]

    def do(self, **job: Any) -> list[int]:
        self.start(**job)
        return self.codes()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_jsonl(tmp_path_factory.mktemp("data") / "data.jsonl", ROWS)


@pytest.fixture(scope="module")
def server(tiny_llama: Path, data: Path) -> Iterator[Server]:
    server = Server(tiny_llama, data)
    yield server
    server.process.kill()
    server.process.communicate()


def extraction(model: Path, data: Path, cache: Path, pause: float = 0.0, part_tokens: int = 400, **job: Any) -> dict[str, Any]:
    given = {"model": str(model), "data": [str(data)], "cache": str(cache), "engine": "transformers", "max_length": 256}
    sizes = {"part_tokens": part_tokens, "chunk_tokens": 32, "layers": [1, 3]}
    return {"do": "extract", "fields": given | sizes, "pause": pause, "reject_every": REJECT_EVERY, **job}


def samples_by_key(cache: Path) -> dict[bytes, Sample]:
    reader = CacheReader(cache)
    samples = [reader.read_sample(number) for number in range(reader.num_samples)]
    assert len({sample.key for sample in samples}) == len(samples)
    return {sample.key: sample for sample in samples}


def assert_same_cache(cache: Path, reference: Path) -> None:
    ours, theirs = samples_by_key(cache), samples_by_key(reference)
    assert ours.keys() == theirs.keys()
    for key, sample in ours.items():
        for field in fields(Sample):
            assert np.array_equal(getattr(sample, field.name), getattr(theirs[key], field.name)), field.name
    assert (cache / "rejects.jsonl").read_bytes() == (reference / "rejects.jsonl").read_bytes()
    assert verify(cache, teacher=False).problems == []
    assert sorted(path.name for path in cache.iterdir()) == ["cache.json", "extract.log.jsonl", "partial", "parts", "rejects.jsonl", "target"]
    assert list((cache / "partial").iterdir()) == []


@pytest.fixture(scope="module")
def reference(server: Server, tiny_llama: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of an uninterrupted run."""
    cache = tmp_path_factory.mktemp("reference") / "cache"
    assert server.do(**extraction(tiny_llama, data, cache)) == [0]
    stored = samples_by_key(cache)
    rejects = (cache / "rejects.jsonl").read_text().splitlines()
    assert len(stored) + len(rejects) == len(ROWS)
    assert sum("infinite or NaN" in line for line in rejects) == 7
    return cache


def test_killed_at_thirty_random_moments_the_cache_is_that_of_an_uninterrupted_run(server, reference, tiny_llama, data, tmp_path):
    moments = random.Random(0)
    started = time.monotonic()
    assert server.do(**extraction(tiny_llama, data, tmp_path / "timed", pause=0.004)) == [0]
    seconds = time.monotonic() - started
    kills = rounds = parts_kept = 0
    while kills < KILLS:
        cache = tmp_path / f"cache{rounds}"
        rounds += 1
        job = extraction(tiny_llama, data, cache, pause=0.004)
        for _ in range(4):
            (pid,) = server.start(**job)
            time.sleep(moments.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)  # to one that has ended by itself this does nothing; it is still to be waited for
            (code,) = server.codes()
            assert code in (0, -signal.SIGKILL)
            kills += code != 0
            parts_kept += len(list(cache.glob("parts/*")))
        assert server.do(**job) == [0]
        assert_same_cache(cache, reference)
    assert parts_kept > 0


def test_killed_before_any_of_its_renames_the_next_run_completes_the_cache(server, reference, tiny_llama, data, tmp_path):
    """What can be seen changes by rename only: cache.json, two files of target/ and itself, two parts, rejects.jsonl."""
    codes = []
    for number in range(20):
        cache = tmp_path / f"cache{number}"
        job = extraction(tiny_llama, data, cache, part_tokens=3000)
        codes += server.do(**job, die_at=number)
        if codes[-1] == 0:
            break
        assert server.do(**job) == [0]
        assert_same_cache(cache, reference)
    assert codes == [-signal.SIGKILL] * 7 + [0]


@pytest.mark.parametrize("writers", [2, 4])
def test_several_processes_write_into_one_cache_and_every_row_is_right_each_of_ten_rounds(server, make, tmp_path, writers):
    spec = make.spec()
    wanted = {sample.key: sample for sample in (make.sample(number, 25, spec) for number in range(40))}
    for number in range(10):
        cache = tmp_path / f"cache{number}"
        open_cache(cache, spec)
        assert server.do(do="write", cache=str(cache), writers=writers, samples=40, length=25) == [0] * writers
        stored = samples_by_key(cache)
        assert stored.keys() == wanted.keys()
        for key, sample in stored.items():
            for field in fields(Sample):
                assert np.array_equal(getattr(sample, field.name), getattr(wanted[key], field.name)), field.name
