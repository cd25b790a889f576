"""The reader returns what was written or raises; never zeros, never a neighbour's bytes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import zarr

from dflash_cache.common import layout, planes
from dflash_cache.common.errors import CacheDamaged, InputError
from dflash_cache.train.reader import CacheReader


def test_the_mapped_reader_equals_plain_zarr(write_cache):
    cache, _, _ = write_cache(lengths=[30, 50, 11, 64, 40])
    reader = CacheReader(cache)
    for number, part in enumerate(reader.parts):
        group = zarr.open_group(part.path, mode="r")
        exponent, mantissa = (group[f"hidden_states/{plane}"][5:27][:, [0, 2]] for plane in layout.PLANES)
        assert np.array_equal(reader.read_states(number, 5, 27, layout.HIDDEN_STATES, (0, 2)), planes.merge(exponent, mantissa))
        exponent, mantissa = (group[f"{layout.VERIFIER}/{plane}"][...] for plane in layout.PLANES)
        assert np.array_equal(reader.read_states(number, 0, part.manifest.tokens, layout.VERIFIER, (0,))[:, 0], planes.merge(exponent, mantissa))


def test_a_drafter_of_fewer_layers_opens_fewer_files(write_cache):
    cache, _, _ = write_cache(lengths=[20])
    for plane in layout.PLANES:
        (cache / "parts/00000000-0000" / layout.shard_path(layout.HIDDEN_STATES, plane, 1)).write_bytes(b"")
        (cache / "parts/00000000-0000" / layout.shard_path(layout.VERIFIER, plane, None)).write_bytes(b"")
    with pytest.raises(CacheDamaged, match=r"c/0/1/0|verifier"):
        CacheReader(cache)


def test_a_flipped_bit_in_any_state_file_is_raised_and_named_on_touch(write_cache):
    cache, _, samples = write_cache(lengths=[40])
    part = cache / "parts/00000000-0000"
    for path in [p for p in part.rglob("c/0/*") if p.is_file()] + [p for p in part.rglob("c/0/*/0") if p.is_file()]:
        intact = path.read_bytes()
        for position in {0, len(intact) // 2, len(intact) - 1}:
            damaged = bytearray(intact)
            damaged[position] ^= 4
            path.write_bytes(bytes(damaged))
            with pytest.raises(CacheDamaged) as caught:
                CacheReader(cache).read_sample(0)
            assert str(path) in str(caught.value)
        path.write_bytes(intact)
    assert np.array_equal(CacheReader(cache).read_sample(0).hidden_states, samples[0].hidden_states)


@pytest.mark.parametrize("damage", ["delete", "empty", "truncate", "grow"])
def test_a_file_of_another_size_is_refused_on_opening(write_cache, damage):
    cache, _, _ = write_cache(lengths=[40])
    path = cache / "parts/00000000-0000/hidden_states/exponent/c/0/1/0"
    data = path.read_bytes()
    path.unlink() if damage == "delete" else path.write_bytes({"empty": b"", "truncate": data[:-1], "grow": data + b"x"}[damage])
    with pytest.raises(CacheDamaged, match="c/0/1/0"):
        CacheReader(cache)


def test_parts_of_another_cache_renamed_parts_and_links_are_refused(write_cache, tmp_path):
    cache, _, _ = write_cache(lengths=[40])
    other, _, _ = write_cache(lengths=[40], name="other", layer_ids=(1, 2))
    shutil.copytree(other / "parts/00000000-0000", cache / "parts/00000001-0000")
    with pytest.raises(CacheDamaged):
        CacheReader(cache)
    shutil.rmtree(cache / "parts/00000001-0000")
    (cache / "parts/00000001-0000").symlink_to(cache / "parts/00000000-0000")
    with pytest.raises(CacheDamaged, match="no links"):
        CacheReader(cache)
    (cache / "parts/00000001-0000").unlink()
    (cache / "parts/00000000-0000").rename(cache / "parts/00000007-0000")
    with pytest.raises(CacheDamaged, match="renamed"):
        CacheReader(cache)


@pytest.mark.parametrize("field", ["tokens", "samples", "chunk_tokens"])
def test_a_manifest_that_lies_is_refused_before_anything_is_allocated(write_cache, field):
    cache, _, _ = write_cache(lengths=[40])
    path = cache / "parts/00000000-0000/zarr.json"
    document = json.loads(path.read_text())
    document["attributes"]["dflash"][field] = 10**12
    path.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")))
    with pytest.raises(CacheDamaged):
        CacheReader(cache)


def test_a_cache_without_samples_is_refused(write_cache):
    cache, _, _ = write_cache(lengths=[])
    with pytest.raises(InputError, match="no samples"):
        CacheReader(cache)


def test_tokens_are_counted_over_all_parts_next_tokens_included(write_cache):
    cache, spec, samples = write_cache(next_token=3)
    wanted = np.bincount(np.concatenate([s.input_ids for s in samples]), minlength=spec.settings.target.vocab_size)
    wanted[3] += len(samples)
    assert np.array_equal(CacheReader(cache).token_counts(), wanted)


def test_more_shards_than_may_be_open_are_read_all_the_same(write_cache, monkeypatch):
    import dflash_cache.train.reader as module

    monkeypatch.setattr(module, "MAX_OPEN_SHARDS", 3)
    cache, _, samples = write_cache(lengths=[40, 50, 60, 30])
    reader = module.CacheReader(cache)
    for number in (3, 0, 2, 1, 0):
        assert np.array_equal(reader.read_sample(number).hidden_states, samples[number].hidden_states)
    assert len(reader._shards) <= 3


def test_what_is_returned_is_nobody_elses(write_cache):
    cache, _, samples = write_cache(lengths=[40])
    reader = CacheReader(cache)
    first = reader.read_sample(0)
    first.hidden_states[...] = 0
    with pytest.raises(ValueError, match="read-only"):
        first.loss_mask[...] = 0
    assert np.array_equal(reader.read_sample(0).hidden_states, samples[0].hidden_states)


def test_lossy_features_decode_to_the_rounded_values(write_cache):
    cache, _, samples = write_cache(lengths=[40], mantissa_bits=3)
    assert np.array_equal(CacheReader(cache).read_sample(0).hidden_states, planes.round_mantissa(samples[0].hidden_states))
