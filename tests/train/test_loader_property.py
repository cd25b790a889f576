"""The loader against `CacheReader.read_sample`, its slow and obvious twin: the same documents whatever is asked and however it is used."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import make_sample, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.common import layout
from dflash_cache.common.errors import CacheDamaged
from dflash_cache.common.sample import NO_TOKEN, Sample
from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train.batch import PADDING, Batch
from dflash_cache.train.loader import RowLoader
from dflash_cache.train.reader import CacheReader

SHAPES = [
    {"chunk_tokens": 16, "part_tokens": 150},
    {"chunk_tokens": 5, "part_tokens": 60},
    {"chunk_tokens": 64, "part_tokens": 1000, "mantissa_bits": 3},
    {"chunk_tokens": 7, "part_tokens": 20},
]
"""Of four caches: their chunks share no borders."""
LENGTHS = [
    np.random.default_rng(0).integers(1, 90, 20).tolist(),
    [1, 1, 1, 5, 5, 1, 10, 4, 1, 1, 33, 2, 5, 60],
    np.random.default_rng(1).integers(1, 40, 30).tolist(),
    [200],
]


def write(cache: Path, lengths: Sequence[int], seed: int = 0, **shape: int) -> Path:
    spec = make_spec(**shape)
    open_cache(cache, spec)
    writer = CacheWriter(cache, spec)
    for number, length in enumerate(lengths):
        writer.add(make_sample(number, length, spec, seed=seed, next_token=9 if number % 2 else NO_TOKEN))
    writer.close()
    return cache


class Known:
    """A cache, its reader, and its samples as `read_sample` gives them."""

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, CacheReader(path)
        self.samples = [CacheReader(path).read_sample(number) for number in range(self.reader.num_samples)]


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> list[Known]:
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        return [Known(write(folder / str(n), lengths, n, **shape)) for n, (lengths, shape) in enumerate(zip(LENGTHS, SHAPES, strict=True))]


def bits(states: torch.Tensor) -> np.ndarray:
    return states.view(torch.int16).numpy().view(np.uint16)


def assert_right(batch: Batch, wanted: Sequence[Sequence[Sample]], slots: Sequence[int]) -> None:
    """Every position of a row is what the samples that it names say. wanted: the samples of each of the loader's readers."""
    at = 0
    for number, (cache, sample) in enumerate(batch.sample_ids):
        right = wanted[cache][sample]
        length = min(len(right), len(batch.input_ids_T) - at)
        assert length == len(right) or at == 0  # only a document that is alone is cut
        here = slice(at, at + length)
        assert (batch.document_T[here] == number).all()
        assert batch.position_T[here].tolist() == list(range(length))
        assert batch.input_ids_T[here].tolist() == right.input_ids[:length].tolist()
        assert batch.loss_mask_T[here].tolist() == right.loss_mask[:length].astype(bool).tolist()
        assert batch.next_ids_T[here].tolist() == [*right.input_ids.tolist(), right.next_token][1 : length + 1]
        assert batch.next_supervised_T[here].tolist() == [*right.loss_mask.astype(bool).tolist(), right.next_token != NO_TOKEN][1 : length + 1]
        assert np.array_equal(bits(batch.features)[here], right.hidden_states[:length, slots])
        if batch.verifier is not None:
            assert np.array_equal(bits(batch.verifier)[here], right.verifier_last_hidden_states[:length])
        assert batch.sources[number] == right.source
        at += length
    assert (batch.document_T[at:] == PADDING).all()
    assert not batch.loss_mask_T[at:].any()
    assert not batch.next_supervised_T[at:].any()
    assert not batch.features[at:].any()
    assert batch.verifier is None or not batch.verifier[at:].any()


def names(batches: Iterable[Batch]) -> list[tuple[tuple[int, int], ...]]:
    return [batch.sample_ids for batch in batches]


@given(
    which=st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=4),
    row_tokens=st.integers(1, 300),
    buffer_bytes=st.sampled_from([1, 3_000, 100_000, 1 << 30]),
    layer_ids=st.sampled_from([None, (1,), (4, 1)]),
    need_verifier=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    share=st.sampled_from([None, 0.0, 0.5]),
    start=st.floats(0, 1.1),
    stride=st.integers(1, 4),
    left_early=st.booleans(),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_row_of_an_epoch_entered_anywhere_is_what_the_slow_reader_says(
    caches, which, row_tokens, buffer_bytes, layer_ids, need_verifier, shuffle, seed, share, start, stride, left_early
):
    """A cache may be there twice, and only some of the samples be asked for. All rows are held to the end, so that a row
    whose memory is taken for a later one shows."""
    wanted = [caches[n].samples for n in which]
    everything = [(cache, number) for cache, samples in enumerate(wanted) for number in range(len(samples))]
    mask = np.ones(len(everything), bool) if share is None else np.random.default_rng(seed).random(len(everything)) < share
    loader = RowLoader(
        [caches[n].reader for n in which],
        layer_ids=layer_ids,
        row_tokens=row_tokens,
        need_verifier=need_verifier,
        seed=seed,
        shuffle=shuffle,
        chosen=None if share is None else lambda epoch: mask,
        buffer_bytes=buffer_bytes,
    )
    if left_early:
        next(loader.epoch(1), None)
    held = list(loader.epoch(0))
    first = int(start * len(held))
    entered, some = list(loader.epoch(0, first)), list(loader.epoch(0, rows=range(0, len(held), stride)))
    for batch in [*held, *entered, *some]:
        assert_right(batch, wanted, {None: [0, 1, 2], (1,): [0], (4, 1): [0, 2]}[layer_ids])
    assert len(held) == loader.rows_per_epoch(0)
    assert names(entered) == names(held)[first:]
    assert names(some) == names(held)[::stride]
    assert sorted(sample for row in names(held) for sample in row) == [
        sample for sample, is_chosen in zip(everything, mask, strict=True) if is_chosen
    ]
    assert sum(batch.num_tokens for batch in held) == sum(loader.tokens_per_row(0))
    loader.close()


def test_epochs_that_are_read_side_by_side_do_not_disturb_each_other(caches):
    wanted = [known.samples for known in caches]
    loader = RowLoader([known.reader for known in caches], layer_ids=None, row_tokens=64, need_verifier=True, seed=0, buffer_bytes=20_000)
    for pair in zip(loader.epoch(0), loader.epoch(1), loader.epoch(0, 3), strict=False):
        for batch in pair:
            assert_right(batch, wanted, [0, 1, 2])


def test_a_row_may_be_written_to_by_whoever_got_it(caches):
    """What a consumer does to its row shows in no later row, and not in the cache's own arrays."""
    loader = RowLoader([caches[0].reader], layer_ids=None, row_tokens=64, need_verifier=True, seed=0, buffer_bytes=1)
    for epoch in range(3):
        for batch in loader.epoch(epoch):
            assert_right(batch, [caches[0].samples], [0, 1, 2])
            for tensor in (batch.features, batch.verifier, batch.input_ids_T, batch.loss_mask_T, batch.next_ids_T, batch.document_T):
                tensor.fill_(1)


@pytest.mark.parametrize("threads", [1, 8])
def test_the_number_of_threads_changes_no_row(caches, monkeypatch, threads):
    readers = [known.reader for known in caches]
    options = {"layer_ids": None, "row_tokens": 50, "need_verifier": True, "seed": 2}
    usual = list(RowLoader(readers, **options).epoch(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(threads)))
    np.random.seed(threads)
    torch.manual_seed(threads)
    other = list(RowLoader(readers, **options).epoch(0))
    assert names(other) == names(usual)
    assert all(torch.equal(one.features.view(torch.int16), two.features.view(torch.int16)) for one, two in zip(other, usual, strict=True))


def test_damage_met_by_a_decoding_thread_ends_the_epoch_and_no_row_that_was_given_is_wrong(write_cache):
    """One bit of each shard in turn, so that one thread fails while others still work on the same rows."""
    lengths = np.random.default_rng(3).integers(5, 60, 24).tolist()
    cache, _, samples = write_cache(lengths=lengths, part_tokens=400)
    shards = [file for part in sorted((cache / "parts").iterdir()) for shard in layout.shards(3) if (file := part / layout.shard_path(*shard))]
    for shard in shards:
        intact = shard.read_bytes()
        damaged = bytearray(intact)
        damaged[len(intact) // 2] ^= 1
        shard.write_bytes(damaged)
        loader = RowLoader([CacheReader(cache)], layer_ids=None, row_tokens=64, need_verifier=True, seed=0, buffer_bytes=30_000)
        given, place = 0, ""
        try:
            for batch in loader.epoch(0):
                assert_right(batch, [samples], [0, 1, 2])
                given += 1
        except CacheDamaged as error:
            place = error.place
        assert place.startswith(str(shard)), shard
        assert given < loader.rows_per_epoch(0)
        with pytest.raises(CacheDamaged):  # and so it stays: no thread has died, nothing waits for ever
            list(loader.epoch(0))
        loader.close()
        shard.write_bytes(intact)


@pytest.mark.parametrize("lengths", [[3] * 800, [33] * 100, [1, 2, 200] * 36, [64, 65] * 40], ids=["short", "half a row and one", "long", "a row"])
def test_the_memory_of_rows_keeps_to_the_buffer_whatever_the_lengths(tmp_path, monkeypatch, lengths):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    cache = write(tmp_path / "cache", lengths, hidden=512, layer_ids=(0, 1, 2, 3), chunk_tokens=32, part_tokens=10**6, num_layers=6)
    row_bytes = 64 * 5 * 512 * 2
    loader = RowLoader([CacheReader(cache)], layer_ids=None, row_tokens=64, need_verifier=True, seed=0, buffer_bytes=12 * row_bytes)
    assert loader.rows_per_epoch(0) > 30
    tracemalloc.start()
    try:
        for _ in loader.epoch(0):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 18 * row_bytes
