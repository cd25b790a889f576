"""Killed anywhere, an extraction loses nothing that was committed and the same command again makes the same cache.

The real `run.run` with a fake engine, in children of a process that has imported everything once (`fork_server`).
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import fields

import numpy as np
import pytest
from forked import assert_same_cache, extraction, samples_by_key

from dflash_cache.common.sample import Sample
from dflash_cache.extract.writer import open_cache

KILLS = 30


def test_killed_at_thirty_random_moments_the_cache_is_that_of_an_uninterrupted_run(server, whole_cache, tiny_llama, rows_file, tmp_path):
    moments = random.Random(0)
    started = time.monotonic()
    assert server.do(**extraction(tiny_llama, rows_file, tmp_path / "timed", pause=0.004)) == [0]
    seconds = time.monotonic() - started
    kills = rounds = parts_kept = 0
    while kills < KILLS:
        cache = tmp_path / f"cache{rounds}"
        rounds += 1
        job = extraction(tiny_llama, rows_file, cache, pause=0.004)
        for _ in range(4):
            (pid,) = server.start(**job)
            time.sleep(moments.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)  # to one that has ended by itself this does nothing; it is still to be waited for
            (code,) = server.codes()
            assert code in (0, -signal.SIGKILL)
            kills += code != 0
            parts_kept += len(list(cache.glob("parts/*")))
        assert server.do(**job) == [0]
        assert_same_cache(cache, whole_cache)
    assert parts_kept > 0


def test_killed_before_any_of_its_renames_the_next_run_completes_the_cache(server, whole_cache, tiny_llama, rows_file, tmp_path):
    """What can be seen changes by rename only: cache.json, two files of target/ and itself, two parts, rejects.jsonl."""
    codes = []
    for number in range(20):
        cache = tmp_path / f"cache{number}"
        job = extraction(tiny_llama, rows_file, cache, part_tokens=3000)
        codes += server.do(**job, die_at=number)
        if codes[-1] == 0:
            break
        assert server.do(**job) == [0]
        assert_same_cache(cache, whole_cache)
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
