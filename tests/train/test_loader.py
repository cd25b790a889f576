"""The loader: each document once an epoch, whole, with its own states; the same rows whenever it is asked again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_cache.common import planes
from dflash_cache.common.errors import InputError
from dflash_cache.train.batch import PADDING
from dflash_cache.train.loader import RowLoader
from dflash_cache.train.reader import CacheReader

LENGTHS = [10, 20, 30, 25, 18, 7, 33, 64, 12, 50, 3, 28]


def make_loader(*caches, **options):
    return RowLoader([CacheReader(cache) for cache in caches], **{"layer_ids": None, "row_tokens": 64, "need_verifier": True, "seed": 0, **options})


def states(tensor):
    assert tensor.dtype == torch.bfloat16
    return tensor.view(torch.int16).numpy().view(np.uint16)


def test_every_document_arrives_whole_with_its_own_states_tokens_and_following_tokens(write_cache):
    cache, _, samples = write_cache(lengths=LENGTHS, next_token=9)
    seen = []
    for batch in make_loader(cache).epoch(0):
        features, verifier = states(batch.features), states(batch.verifier)
        for number, (_, sample) in enumerate(batch.sample_ids):
            seen.append(sample)
            here = np.flatnonzero(batch.document_T.numpy() == number)
            wanted = samples[sample]
            assert batch.position_T[here].tolist() == list(range(len(wanted)))
            assert np.array_equal(batch.input_ids_T[here], wanted.input_ids)
            assert np.array_equal(features[here], wanted.hidden_states)
            assert np.array_equal(verifier[here], wanted.verifier_last_hidden_states)
            assert batch.next_ids_T[here].tolist() == [*wanted.input_ids[1:], 9]
            assert batch.next_supervised_T[here].tolist() == [*wanted.loss_mask[1:].astype(bool), True]
            assert batch.sources[number] == "data.jsonl"
        padding = batch.document_T == PADDING
        assert not batch.loss_mask_T[padding].any()
        assert not batch.next_supervised_T[padding].any()
    assert sorted(seen) == list(range(len(LENGTHS)))


def test_without_a_known_next_token_the_last_row_predicts_nothing(write_cache):
    cache, _, _ = write_cache(lengths=[10])
    batch = next(iter(make_loader(cache).epoch(0)))
    assert batch.next_ids_T[9].item() == -1
    assert not batch.next_supervised_T[9]


def test_selected_layers_come_alone_and_in_ascending_order(write_cache):
    cache, _, samples = write_cache(lengths=[30])
    batch = next(iter(make_loader(cache, layer_ids=(4, 1), need_verifier=False).epoch(0)))
    assert batch.verifier is None
    assert np.array_equal(states(batch.features)[:30], samples[0].hidden_states[:, [0, 2]])


def row_ids(loader, epoch=0, start=0):
    return [batch.sample_ids for batch in loader.epoch(epoch, start)]


def test_an_epoch_repeats_exactly_and_can_be_entered_anywhere(write_cache):
    cache, _, _ = write_cache(lengths=LENGTHS * 4)
    first = row_ids(make_loader(cache))
    assert row_ids(make_loader(cache)) == first
    for start in range(len(first) + 1):
        assert row_ids(make_loader(cache), start=start) == first[start:]
    assert row_ids(make_loader(cache), epoch=1) != first
    assert make_loader(cache).rows_per_epoch(0) == len(first)


def test_without_shuffle_the_order_is_that_of_the_cache(write_cache):
    cache, _, _ = write_cache(lengths=[64] * 9)
    assert [row[0][1] for row in row_ids(make_loader(cache, shuffle=False), epoch=3)] == list(range(9))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_asked_for_by_number_are_the_very_rows_of_the_epoch(write_cache, size, shuffle):
    cache, _, _ = write_cache(lengths=LENGTHS * 6, part_tokens=200)
    loader = make_loader(cache, shuffle=shuffle)
    whole, count = list(loader.epoch(3)), loader.rows_per_epoch(3)
    assert sorted(s for batch in whole for s in batch.sample_ids) == [(0, i) for i in range(len(LENGTHS) * 6)]
    assert [batch.num_tokens for batch in whole] == loader.tokens_per_row(3)
    for first in range(size):
        part = list(make_loader(cache, shuffle=shuffle).epoch(3, rows=range(first, count, size)))
        assert len(part) == len(whole[first::size])
        for ours, theirs in zip(part, whole[first::size]):
            assert ours.sample_ids == theirs.sample_ids
            assert torch.equal(ours.features, theirs.features)
            assert torch.equal(ours.verifier, theirs.verifier)
            assert torch.equal(ours.next_ids_T, theirs.next_ids_T)


def test_several_caches_are_read_as_one(write_cache):
    one, _, _ = write_cache(lengths=[20, 30], name="one")
    two, _, samples = write_cache(lengths=[25, 10], name="two", seed=5)
    batches = list(make_loader(one, two).epoch(0))
    assert sorted(s for batch in batches for s in batch.sample_ids) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for batch in batches:
        for number, (cache, sample) in enumerate(batch.sample_ids):
            if cache == 1:
                here = np.flatnonzero(batch.document_T.numpy() == number)
                assert np.array_equal(states(batch.features)[here], samples[sample].hidden_states)


def test_a_document_longer_than_a_row_is_cut_and_its_next_token_is_its_own(write_cache):
    cache, _, samples = write_cache(lengths=[100])
    batch = next(iter(make_loader(cache, row_tokens=40).epoch(0)))
    assert batch.num_tokens == 40
    assert batch.next_ids_T[39].item() == samples[0].input_ids[40]


def test_three_bit_features_come_as_the_rounded_values(write_cache):
    cache, _, samples = write_cache(lengths=[30], mantissa_bits=3)
    batch = next(iter(make_loader(cache).epoch(0)))
    assert np.array_equal(states(batch.features)[:30], planes.round_mantissa(samples[0].hidden_states))


def test_caches_of_different_precision_are_read_together(write_cache):
    one, _, exact = write_cache(lengths=[20], name="one")
    two, _, rounded = write_cache(lengths=[20], name="two", mantissa_bits=3, seed=5)
    (batch,) = make_loader(one, two, shuffle=False).epoch(0)
    assert np.array_equal(states(batch.features)[:20], exact[0].hidden_states)
    assert np.array_equal(states(batch.features)[20:40], planes.round_mantissa(rounded[0].hidden_states))


def test_a_cache_without_the_layer_is_refused(write_cache):
    one, _, _ = write_cache(lengths=[20], name="one")
    with pytest.raises(InputError, match="layers"):
        make_loader(one, layer_ids=(1, 3))


def test_each_chunk_is_decoded_about_once_an_epoch(write_cache, monkeypatch):
    from dflash_cache.train import reader as module

    cache, _, _ = write_cache(lengths=np.random.default_rng(0).integers(5, 60, 400).tolist(), part_tokens=4000)
    loader = make_loader(cache)
    decoded = []
    original = module._Shard.decompressed
    monkeypatch.setattr(
        module._Shard, "decompressed", lambda self, number, size: (decoded.append((str(self.path), number)), original(self, number, size))[1]
    )
    for _ in loader.epoch(0):
        pass
    assert len(set(decoded)) == 4 * sum(part.manifest.num_chunks for part in loader._readers[0].parts)
    assert len(decoded) / len(set(decoded)) < 1.1


def test_rows_that_are_still_held_are_never_overwritten_and_those_let_go_are_used_again(write_cache):
    cache, _, _ = write_cache(lengths=[64] * 40)
    loader = make_loader(cache)
    held = list(loader.epoch(0))
    before = [batch.features.clone() for batch in held]
    places = {batch.features.data_ptr() for batch in held}
    assert len(places) == len(held)
    again = list(loader.epoch(0))
    assert all(torch.equal(one.features, two) for one, two in zip(held, before, strict=True))
    assert not places & {batch.features.data_ptr() for batch in again}
    del held, again
    free = {owner.ctypes.data for kept in loader._memory.free.values() for owner in kept}
    assert places <= free
    assert {batch.features.data_ptr() for batch in loader.epoch(1)} <= free


def test_an_epoch_that_is_left_early_spoils_no_later_one(write_cache):
    cache, _, _ = write_cache(lengths=LENGTHS * 40, part_tokens=2000)
    loader = make_loader(cache)
    wanted = [batch.features.clone() for batch in make_loader(cache).epoch(1)]
    for _ in range(5):
        next(iter(loader.epoch(0)))
        assert all(torch.equal(batch.features, right) for batch, right in zip(loader.epoch(1), wanted, strict=True))


def test_a_small_buffer_changes_the_order_but_no_sample(write_cache):
    cache, _, _ = write_cache(lengths=LENGTHS * 40, part_tokens=2000)
    small, large = make_loader(cache, buffer_bytes=1), make_loader(cache)
    assert small._windows.window_of.max() > large._windows.window_of.max()
    assert sorted(s for row in row_ids(small) for s in row) == sorted(s for row in row_ids(large) for s in row)
