"""What a reader takes from the machine: few file handles however many parts there are, and no more memory with each epoch."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from builders import link_parts

from dflash_cache.common.sample import Sample
from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train import reader as module
from dflash_cache.train.reader import CacheReader

PARTS = 1000

READ_ALL = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from pathlib import Path
from dflash_cache.train.reader import CacheReader
reader = CacheReader(Path(sys.argv[1]))
total = most = 0
for number in range(reader.num_samples):
    total += int(reader.read_sample(number).hidden_states.astype("i8").sum())
    most = max(most, len(os.listdir("/proc/self/fd")))
print(reader.num_samples, total, most)
"""

THREE_EPOCHS = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from dflash_cache.train.loader import RowLoader
from dflash_cache.train.reader import CacheReader

def anonymous_kilobytes():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

loader = RowLoader([CacheReader(Path(sys.argv[1]))], layer_ids=None, row_tokens=2048, need_verifier=True, seed=0)
after = []
for epoch in range(3):
    tokens = sum(batch.num_tokens for batch in loader.epoch(epoch))
    after.append(anonymous_kilobytes())
print(tokens, *after)
"""

UNDER_A_GIGABYTE = """
import resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from dflash_cache.train.loader import RowLoader
from dflash_cache.train.reader import CacheReader

resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
reader = CacheReader(Path(sys.argv[1]))
loader = RowLoader([reader], layer_ids=None, row_tokens=2048, need_verifier=True, seed=0, buffer_bytes=400 << 20)
print(sum(batch.num_tokens for batch in loader.epoch(0)), sum(part.manifest.stored_bytes for part in reader.parts))
"""


@pytest.fixture
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def test_a_thousand_parts_are_read_under_a_limit_of_256_files(tmp_path, make, no_fsync):
    spec, cache = make.spec(), tmp_path / "c"
    open_cache(cache, spec)
    writer = CacheWriter(cache, spec)
    sample = make.sample(0, 5, spec)
    writer.add(sample)
    writer.close()
    link_parts(cache, PARTS)
    done = subprocess.run([sys.executable, "-c", READ_ALL, str(cache)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    samples, total, most = map(int, done.stdout.split())
    assert samples == PARTS
    assert total == PARTS * int(sample.hidden_states.astype(np.int64).sum())
    assert most <= 256 // module.SHARE_OF_HANDLES + 20


def test_memory_does_not_grow_from_epoch_to_epoch_over_300_megabytes(tmp_path, make, no_fsync):
    spec, cache = make.spec(hidden=512, layer_ids=(0, 1, 2, 3, 4), chunk_tokens=512, part_tokens=8192), tmp_path / "c"
    open_cache(cache, spec)
    writer = CacheWriter(cache, spec)
    states = make.bits(np.random.default_rng(0).standard_normal((512, 6, 512)))
    ids, mask = np.full(512, 5, np.int32), np.ones(512, np.uint8)
    for number in range(96):
        writer.add(Sample(number.to_bytes(16, "little"), "d", number, ids, mask, states[:, :-1], states[:, -1], 5, -1))
    writer.close()
    assert 96 * states.nbytes > 300e6
    returned = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once, so that what grows is what is held
    done = subprocess.run([sys.executable, "-c", THREE_EPOCHS, str(cache)], capture_output=True, text=True, env=returned)
    assert done.returncode == 0, done.stderr
    tokens, first, _, third = map(int, done.stdout.split())
    assert tokens == 96 * 512
    assert third - first < 20_000


def test_a_cache_of_four_gigabytes_is_read_under_a_limit_of_one(tmp_path, make, no_fsync):
    spec, cache = make.spec(hidden=4096, layer_ids=(0, 1, 2, 3, 4), chunk_tokens=512, part_tokens=1 << 20), tmp_path / "c"
    open_cache(cache, spec)
    writer = CacheWriter(cache, spec)
    states = make.bits(np.random.default_rng(0).standard_normal((640, 6, 4096)))
    ids, mask = np.full(640, 5, np.int32), np.ones(640, np.uint8)
    for number in range(8):
        writer.add(Sample(number.to_bytes(16, "little"), "d", number, ids, mask, states[:, :-1], states[:, -1], 5, -1))
    writer.close()
    link_parts(cache, 24)
    done = subprocess.run([sys.executable, "-c", UNDER_A_GIGABYTE, str(cache)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tokens, stored = map(int, done.stdout.split())
    assert tokens == 24 * 8 * 640
    assert stored > 4e9


def test_small_arrays_are_kept_up_to_a_bound_and_read_again_when_they_were_dropped(write_cache, monkeypatch):
    cache, _, samples = write_cache(lengths=[70, 71, 72, 73])
    monkeypatch.setattr(module, "MAX_SMALL_BYTES", 600)
    reader = CacheReader(cache)
    for number in (0, 1, 2, 3, 0, 2):
        assert np.array_equal(reader.tokens(number, "input_ids"), samples[number].input_ids)
        assert np.array_equal(reader.tokens(number, "loss_mask"), samples[number].loss_mask)
        assert sum(values.nbytes for values in reader._small.values()) == reader._small_bytes <= 600


def test_the_handles_of_a_reader_follow_the_limit_of_the_process(write_cache, monkeypatch):
    cache, _, _ = write_cache(lengths=[20])
    for limit, wanted in ((1024, 128), (1 << 20, 128), (256, 32), (4, 1)):
        monkeypatch.setattr(module.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert CacheReader(cache)._max_open == wanted
