"""`dflash inspect`: what is counted and what is remarked on."""

from __future__ import annotations

import json

import numpy as np
from click.testing import CliRunner

from dflash_cache.cli import main
from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train.inspect_cache import LengthBin, inspect, length_histogram, remark


def test_lengths_are_counted_by_powers_of_two_without_gaps():
    assert length_histogram(np.array([1, 2, 3, 4, 7, 8, 100, 127, 128])) == [
        LengthBin(1, 1, 1),
        LengthBin(2, 3, 2),
        LengthBin(4, 7, 2),
        LengthBin(8, 15, 1),
        LengthBin(16, 31, 0),
        LengthBin(32, 63, 0),
        LengthBin(64, 127, 2),
        LengthBin(128, 255, 1),
    ]
    assert length_histogram(np.array([5])) == [LengthBin(4, 7, 1)]


def test_every_sample_is_in_the_histogram_and_the_parts_add_up(write_cache):
    cache, _, samples = write_cache(lengths=[10, 20, 30, 25, 18, 7])
    report = inspect(cache)
    assert [(found.shortest, found.samples) for found in report.length_histogram] == [(4, 1), (8, 1), (16, 4)]
    assert [(part.name, part.samples, part.tokens) for part in report.part_list] == [("00000000-0000", 4, 85), ("00000001-0000", 2, 25)]
    assert sum(part.bytes for part in report.part_list) == report.stored_bytes
    assert report.stored_bytes == sum(path.stat().st_size for path in (cache / "parts").rglob("*") if path.is_file())
    supervised = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert (report.supervised_tokens, report.supervised_share) == (supervised, supervised / 110)


def test_every_array_has_its_bytes_and_its_ratio_to_the_raw_values(tmp_path, make):
    """64 tokens of 64 equal values: the mantissa is stored as it is, the exponent shrinks to almost nothing."""
    spec = make.spec(hidden=1024, layer_ids=(0, 1), chunk_tokens=64)
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec)
    sample = make.sample(0, 64, spec)
    sample.hidden_states[...] = 0x3F80
    writer.add(sample)
    writer.close()
    sizes = {size.array: size for size in inspect(tmp_path / "c").arrays}
    assert len(sizes) == 13
    mantissa, exponent = sizes["hidden_states/sign_mantissa"], sizes["hidden_states/exponent"]
    assert mantissa.bytes_per_token == mantissa.bytes / 64
    assert 1.0 < mantissa.ratio_to_raw == mantissa.bytes / (64 * 2 * 1024) < 1.02
    assert exponent.ratio_to_raw < 0.02
    assert sizes["input_ids"].ratio_to_raw == sizes["input_ids"].bytes / (64 * 4)


def test_dead_layers_and_outliers_are_remarked_on(tmp_path, make):
    assert [remark(0.0, 0.0), remark(1.0, 100.0), remark(1.0, 101.0)] == ["dead", "", "outliers"]
    spec = make.spec(hidden=1024)
    open_cache(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec)
    sample = make.sample(0, 64, spec)
    sample.hidden_states[:, 0] = 0
    sample.hidden_states[7, 1, 9] = int(make.bits(np.array([4096.0]))[0])
    writer.add(sample)
    writer.close()
    report = inspect(tmp_path / "c")
    assert [(norm.layer, norm.remark) for norm in report.norms] == [("1", "dead"), ("2", "outliers"), ("4", ""), ("verifier 5", "")]
    assert report.norms[1].absolute_maximum == 4096.0


def test_people_see_bars_and_machines_see_counts(write_cache):
    cache, _, _ = write_cache(lengths=[10, 20, 30, 25, 18, 7])
    text = CliRunner().invoke(main, ["inspect", str(cache)]).stdout
    assert f"          16-31         4 {'#' * 40}\n" in text
    assert f"            4-7         1 {'#' * 10}\n" in text
    document = json.loads(CliRunner().invoke(main, ["inspect", str(cache), "--json"]).stdout)
    assert document["length_histogram"][2] == {"shortest": 16, "longest": 31, "samples": 4}
    assert document["part_list"][1]["name"] == "00000001-0000"
    assert document["arrays"][0].keys() == {"array", "bytes", "bytes_per_token", "ratio_to_raw"}
