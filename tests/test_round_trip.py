"""Sample -> writer -> cache -> reader: what goes in comes out, bit for bit; and any Zarr v3 reader sees the same."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr

from dflash_cache.common import layout, manifest, planes
from dflash_cache.common.sample import Sample
from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train.reader import CacheReader


def assert_same(a: Sample, b: Sample) -> None:
    for field in fields(Sample):
        left, right = getattr(a, field.name), getattr(b, field.name)
        assert np.array_equal(left, right), field.name


def test_every_sample_comes_back_bit_for_bit_across_chunks_and_parts(write_cache):
    cache, _, samples = write_cache(lengths=[1, 16, 17, 3, 64, 40, 5, 33], next_token=7)
    reader = CacheReader(cache)
    assert len(reader.parts) > 1
    assert reader.lengths.tolist() == [1, 16, 17, 3, 64, 40, 5, 33]
    for number, sample in enumerate(samples):
        assert_same(reader.read_sample(number), sample)


def test_every_bfloat16_pattern_survives(tmp_path, make):
    """All 65,536: negative zero, denormals, infinities and every NaN payload among them."""
    spec = make.spec(hidden=256, layer_ids=(0,), part_tokens=1000)
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16).reshape(256, 1, 256)
    base = make.sample(0, 256, spec)
    sample = Sample(
        **{
            **{f.name: getattr(base, f.name) for f in fields(Sample)},
            "hidden_states": patterns,
            "verifier_last_hidden_states": patterns[::-1, 0].copy(),
        }
    )
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec)
    writer.add(sample)
    writer.close()
    assert_same(CacheReader(tmp_path / "c").read_sample(0), sample)


@pytest.mark.parametrize("mantissa_bits", [7, 3])
def test_plain_zarr_and_tensorstore_read_every_array(write_cache, mantissa_bits):
    cache, spec, samples = write_cache(mantissa_bits=mantissa_bits)
    start = 0
    for part in manifest.list_parts(cache):
        found = manifest.load(part, spec)
        group = zarr.open_group(part, mode="r")
        names = [name for name, _ in group.members(max_depth=None) if isinstance(group[name], zarr.Array)]
        assert len(names) == len(manifest.SMALL_ARRAYS) + 4
        for name in names:
            ours = np.asarray(group[name][...])
            theirs = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(part / name)}}).result().read().result()
            assert np.array_equal(ours, theirs), name
        bits = planes.decode(group["hidden_states/exponent"][...], group["hidden_states/sign_mantissa"][...], mantissa_bits)
        verifier = planes.merge(group[f"{layout.VERIFIER}/exponent"][...], group[f"{layout.VERIFIER}/sign_mantissa"][...])
        stored = samples[start : start + found.samples]
        start += found.samples
        wanted = np.concatenate([sample.hidden_states for sample in stored])
        assert np.array_equal(bits, wanted if mantissa_bits == 7 else planes.round_mantissa(wanted))
        assert np.array_equal(verifier, np.concatenate([sample.verifier_last_hidden_states for sample in stored]))
        assert np.array_equal(group["input_ids"][...], np.concatenate([sample.input_ids for sample in stored]))


def test_three_mantissa_bits_touch_the_features_only(write_cache):
    cache, _, samples = write_cache(mantissa_bits=3)
    read = CacheReader(cache).read_sample(2)
    assert np.array_equal(read.verifier_last_hidden_states, samples[2].verifier_last_hidden_states)
    assert np.array_equal(read.hidden_states, planes.round_mantissa(samples[2].hidden_states))


def test_an_all_zero_loss_mask_is_stored_and_not_taken_for_missing(write_cache, tmp_path, make):
    """Zarr does not write an all-zero chunk by itself (its reader would not notice the difference)."""
    spec = make.spec()
    open_cache(tmp_path / "zero", spec)
    writer = CacheWriter(tmp_path / "zero", spec)
    writer.add(make.sample(0, 12, spec, prompt=12))
    writer.close()
    assert CacheReader(tmp_path / "zero").read_sample(0).loss_mask.tolist() == [0] * 12


def test_the_golden_cache_stays_readable():
    """A cache of format version 1 that is kept in the repository; see golden/make_golden_cache.py."""
    golden = Path(__file__).parent / "golden"
    reader = CacheReader(golden / "cache-v1")
    expected = json.loads((golden / "cache-v1.json").read_text())
    assert reader.lengths.tolist() == expected["lengths"]
    for number in range(reader.num_samples):
        sample = reader.read_sample(number)
        assert sample.input_ids.tolist() == expected["input_ids"][number]
        assert sample.hidden_states.astype(np.int64).sum(axis=(0, 2)).tolist() == expected["hidden_sums"][number]
        assert int(sample.verifier_last_hidden_states.astype(np.int64).sum()) == expected["verifier_sums"][number]
