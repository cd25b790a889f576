"""`dflash verify`: silent on a whole cache; names part, array and chunk of whatever is not as it was written."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from dflash_cache.cli import main
from dflash_cache.common import layout
from dflash_cache.common.sample import Sample
from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train.fidelity import TeacherCheck
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.verify import verify


def truthful(cache, spec, sample: Sample, shift: int = 0) -> Sample:
    """The sample with the engine's token that its last stored state really gives (plus `shift`)."""
    top1 = int(TeacherCheck(cache).top1(sample.verifier_last_hidden_states[-1:])[0])
    values = {name: getattr(sample, name) for name in sample.__dataclass_fields__}
    return Sample(**{**values, "engine_top1": (top1 + shift) % spec.settings.target.vocab_size})


@pytest.fixture
def true_cache(tmp_path, make):
    spec = make.spec()
    cache = tmp_path / "true"
    open_cache(cache, spec)
    make.target_files(cache, spec)
    writer = CacheWriter(cache, spec)
    for number, length in enumerate([10, 20, 30, 25, 18, 7]):
        writer.add(truthful(cache, spec, make.sample(number, length, spec)))
    writer.close()
    return cache


def test_a_whole_cache_verifies_and_every_count_is_told(true_cache):
    report = verify(true_cache)
    assert report.problems == []
    assert (report.parts, report.samples, report.tokens, report.fidelity, report.fidelity_exact) == (2, 6, 110, 1.0, 6)
    assert report.chunks == 2 * 4 * (6 + 2)  # planes x (layers + verifier) x chunks of 16 in parts of 85 and 25 tokens
    assert report.teacher_tokens == sum(int(CacheReader(true_cache).tokens(i, "loss_mask")[1:].sum()) for i in range(6))


def test_the_command_exits_0_or_1_and_speaks_json(true_cache):
    done = CliRunner().invoke(main, ["verify", str(true_cache), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["ok"] is True
    (true_cache / "parts/00000000-0000/loss_mask/c/0").write_bytes(b"")
    done = CliRunner().invoke(main, ["verify", str(true_cache), "--json"])
    assert done.exit_code == 1
    assert "loss_mask" in json.loads(done.stdout)["problems"][0]["place"]


def test_a_flipped_bit_in_any_file_is_found_and_named(true_cache):
    """One bit in the middle of every file, cache.json and the target's files included; one at a time."""
    for path in sorted(p for p in true_cache.rglob("*") if p.is_file()):
        intact = path.read_bytes()
        damaged = bytearray(intact)
        damaged[len(intact) // 2] ^= 1
        path.write_bytes(bytes(damaged))
        if path.name == layout.CACHE_JSON:
            with pytest.raises(Exception, match=r"cache\.json"):
                verify(true_cache)
        else:
            places = [problem.place for problem in verify(true_cache, teacher=False).problems]
            assert any(str(path) in place or str(path.parent) in place for place in places), (path, places)
        path.write_bytes(intact)
    assert verify(true_cache, teacher=False).ok


def test_a_flipped_bit_in_a_chunk_is_named_with_its_chunk(true_cache):
    path = true_cache / "parts/00000000-0000/hidden_states/sign_mantissa/c/0/2/0"
    data = bytearray(path.read_bytes())
    data[3 * (16 * 8 + 4) + 5] ^= 16
    path.write_bytes(bytes(data))
    assert [p.place for p in verify(true_cache).problems] == [str(path), f"{path} chunk 3"]


def test_states_that_are_not_finite_are_found(tmp_path, make):
    spec = make.spec()
    open_cache(tmp_path / "c", spec)
    make.target_files(tmp_path / "c", spec)
    sample = truthful(tmp_path / "c", spec, make.sample(0, 20, spec))
    sample.hidden_states[17, 1, 3] = 0x7FC0
    writer = CacheWriter(tmp_path / "c", spec)
    writer.add(sample)
    writer.close()
    (problem,) = verify(tmp_path / "c").problems
    assert "row 17 of layer 2" in problem.what
    assert problem.place.endswith("hidden_states chunk 1")


def test_targets_from_the_wrong_layer_are_caught(tmp_path, make):
    """The first fault of the project's history: states of another layer in the verifier's place."""
    spec = make.spec()
    open_cache(tmp_path / "c", spec)
    make.target_files(tmp_path / "c", spec)
    writer = CacheWriter(tmp_path / "c", spec)
    for number in range(20):
        sample = truthful(tmp_path / "c", spec, make.sample(number, 12, spec))
        sample.verifier_last_hidden_states[...] = sample.hidden_states[:, -1]
        writer.add(sample)
    writer.close()
    report = verify(tmp_path / "c")
    assert report.fidelity < 0.5
    assert "wrong layer" in report.problems[-1].what


def test_the_same_sample_twice_is_found(true_cache, make):
    spec = CacheReader(true_cache).spec
    writer = CacheWriter(true_cache, spec)
    writer.add(truthful(true_cache, spec, make.sample(3, 25, spec)))
    writer.close()
    (problem,) = verify(true_cache).problems
    assert "stored twice; the other is 00000000-0000 sample 3" in problem.what


def test_a_part_of_another_cache_is_reported_and_the_rest_is_checked(true_cache, write_cache):
    other, _, _ = write_cache(lengths=[40], name="other", layer_ids=(1, 2))
    shutil.copytree(other / "parts/00000000-0000", true_cache / "parts/00000005-0000")
    report = verify(true_cache)
    assert len(report.problems) == 1
    assert "another cache" in report.problems[0].what
    assert report.samples == 6


def test_values_out_of_range_are_found(tmp_path, make):
    spec = make.spec()
    open_cache(tmp_path / "c", spec)
    make.target_files(tmp_path / "c", spec)
    sample = truthful(tmp_path / "c", spec, make.sample(0, 20, spec))
    sample.input_ids[3] = 99
    sample.loss_mask[4] = 2
    writer = CacheWriter(tmp_path / "c", spec)
    writer.add(sample)
    writer.close()
    places = {p.place.rsplit("/", 1)[1] for p in verify(tmp_path / "c", teacher=False).problems}
    assert places == {"input_ids", "loss_mask"}
    assert np.asarray(sample.input_ids).max() == 99
