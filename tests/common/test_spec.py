"""cache.json: what is read is checked, what differs is named."""

from __future__ import annotations

import json

import pytest

from dflash_cache.common import spec as specs
from dflash_cache.common.errors import CacheDamaged, InputError


def test_what_is_saved_is_loaded(tmp_path, make):
    wanted = make.spec()
    specs.save(tmp_path, wanted)
    assert specs.load(tmp_path) == wanted


def test_a_changed_setting_is_refused_by_name(tmp_path, make):
    with pytest.raises(InputError, match=r"features\.layer_ids: the cache has \[1, 2, 4\], this run has \[1, 2\]"):
        specs.check_same_settings(tmp_path, make.spec(), make.spec(layer_ids=(1, 2)))


def test_settings_of_sampling_that_came_later_leave_the_fingerprint_of_earlier_caches_as_it_was(tmp_path, make):
    def spec(**sampling):
        settings = make.spec().settings
        generation = specs.GenerationSpec(max_new_tokens=8, temperature=1.0, seed=0, **sampling)
        return specs.CacheSpec(settings=settings.model_copy(update={"generation": generation}))

    assert specs.as_written(spec().settings)["generation"] == {"max_new_tokens": 8, "temperature": 1.0, "seed": 0}
    assert spec().fingerprint == spec(top_p=1.0, top_k=0).fingerprint != spec(top_k=5).fingerprint
    specs.save(tmp_path, spec(top_p=0.9))
    assert specs.load(tmp_path) == spec(top_p=0.9)
    with pytest.raises(InputError, match=r"generation\.top_p: the cache has 0\.9, this run has 1\.0"):
        specs.check_same_settings(tmp_path, specs.load(tmp_path), spec())


def test_limits_and_provenance_may_differ(tmp_path, make):
    specs.check_same_settings(tmp_path, make.spec(), make.spec(part_tokens=99))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: d.update(format="other"), InputError),
        (lambda d: d["settings"].update(format_version=2), InputError),
        (lambda d: d["settings"]["target"].update(hidden_size=16), CacheDamaged),
        (lambda d: d["settings"]["features"].update(layer_ids=[4, 1]), CacheDamaged),
        (lambda d: d.update(fingerprint="0" * 64), CacheDamaged),
        (lambda d: d["limits"].update(chunk_tokens=10**12), CacheDamaged),
        (lambda d: d.update(surprise=1), CacheDamaged),
    ],
)
def test_an_edited_cache_json_is_refused(tmp_path, make, change, error):
    specs.save(tmp_path, make.spec())
    document = json.loads((tmp_path / "cache.json").read_text())
    change(document)
    (tmp_path / "cache.json").write_text(json.dumps(document))
    with pytest.raises(error):
        specs.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_torn_cache_json_is_damage_and_never_a_new_cache(tmp_path, content):
    (tmp_path / "cache.json").write_text(content)
    with pytest.raises(CacheDamaged):
        specs.load(tmp_path)


def test_a_folder_without_cache_json_is_no_cache(tmp_path):
    with pytest.raises(InputError, match="no feature cache"):
        specs.load(tmp_path)


def test_the_reference_case_has_the_size_that_the_documents_say(make):
    assert make.spec(hidden=5120, layer_ids=(1, 16, 31, 46, 61), num_layers=64, vocab=248320).raw_bytes_per_token == 61_440
