"""What an epoch reads: held-out samples never, those of weighted caches as often as asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from ranks import settings, write

from dflash_cache.common.errors import InputError
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.loader import RowLoader
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.resolve import make_plan
from dflash_cache.train.split import EpochSamples, held_out, key_hashes, pick


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> tuple[CacheReader, CacheReader]:
    """Of 40 and 30 samples. The first 30 of both have the same keys."""
    folder = tmp_path_factory.mktemp("split")
    return CacheReader(write(folder / "a", [20] * 40)), CacheReader(write(folder / "b", [20] * 30, seed=1))


def read(readers, weights, epoch: int = 0, fraction: float = 0.0, seed: int = 0) -> Counter:
    """(cache, sample) -> how often an epoch's rows hold it."""
    samples = EpochSamples(readers, weights, [held_out(reader, fraction) for reader in readers], seed)
    options = {"layer_ids": None, "row_tokens": 64, "need_verifier": False, "seed": 0}
    loader = RowLoader(samples.readers, numbers=samples.numbers, chosen=samples.chosen, **options)
    found = Counter(sample for batch in loader.epoch(epoch) for sample in batch.sample_ids)
    loader.close()
    return found


def test_without_weights_each_sample_is_read_once(caches):
    assert read(caches, None) == Counter([(0, i) for i in range(40)] + [(1, i) for i in range(30)])


def test_weights_say_how_often(caches):
    """Whole weights exactly; of the fraction another choice of the right size each epoch, the same when asked again."""
    for epoch in (0, 1):
        found = read(caches, [2.0, 1.5], epoch)
        assert [found[0, i] for i in range(40)] == [2] * 40
        assert sorted(found[1, i] for i in range(30)) == [1] * 15 + [2] * 15
        assert found == read(caches, [2.0, 1.5], epoch)
    first, second = (frozenset(k for k, n in read(caches, [0.0, 0.5], epoch).items() if n) for epoch in (0, 1))
    assert len(first) == len(second) == 15
    assert first != second
    assert first != frozenset(read(caches, [0.0, 0.5], 0, seed=1))


def test_two_rows_of_one_sample_hold_the_same_states(caches):
    samples = EpochSamples(caches[:1], [2.0], [held_out(caches[0], 0.0)], 0)
    loader = RowLoader(samples.readers, layer_ids=None, row_tokens=20, need_verifier=False, seed=0, numbers=samples.numbers, chosen=samples.chosen)
    seen: dict = {}
    for batch in loader.epoch(0):
        tokens = batch.input_ids_T.tolist()
        assert seen.setdefault(batch.sample_ids, tokens) == tokens
        assert tokens == caches[0].tokens(batch.sample_ids[0][1], "input_ids").tolist()
    loader.close()


def test_a_key_decides_what_is_held_out_whatever_the_order_of_caches(caches):
    a, b = (held_out(reader, 0.3) for reader in caches)
    assert 4 <= a.sum() <= 20
    assert np.array_equal(a[:30], b)  # same keys
    assert not (held_out(caches[0], 0.1) & ~a).any()  # more is held out, never other samples
    assert not held_out(caches[0], 0.0).any()


def test_what_is_held_out_is_never_read(caches):
    held = held_out(caches[0], 0.3)
    found = read(caches[:1], [2.5], fraction=0.3)
    assert {sample for _, sample in found} == set(np.flatnonzero(~held).tolist())


def test_the_evaluated_samples_are_those_of_lowest_hash(caches):
    allowed = [np.arange(reader.num_samples) % 2 == 0 for reader in caches]
    picked = pick(caches, allowed, 5)
    hashes = np.concatenate([key_hashes(reader) for reader in caches])
    assert picked.sum() == 5
    assert not picked[~np.concatenate(allowed)].any()
    assert hashes[picked].max() <= hashes[np.concatenate(allowed) & ~picked].min()
    assert pick(caches, allowed, 1000).sum() == 35


def plan(*caches: CacheReader, eval_caches=(), **sections):
    return make_plan(TrainConfig.model_validate(settings(**sections)), [reader.path for reader in caches], [reader.path for reader in eval_caches])


def test_the_plan_counts_what_is_read_and_what_is_held_out(caches):
    whole, half = plan(*caches).facts, plan(*caches, data={"weights": [0.5, 2.0]}).facts
    assert (whole.samples, whole.tokens, whole.samples_held_out) == (70, 1400, 0)
    assert (half.samples, half.tokens) == (20 + 60, 1600)
    held = plan(*caches, data={"eval_fraction": 0.3}).facts
    assert held.samples + held.samples_held_out == 70
    assert plan(*caches, data={"eval_fraction": 0.3}, eval={"samples": 3}).facts.samples_held_out == 3


def test_settings_that_do_not_fit_the_caches_are_refused(caches, tmp_path: Path):
    with pytest.raises(InputError, match="1 weights, 2 caches"):
        plan(*caches, data={"weights": [1.0]})
    with pytest.raises(InputError, match="held out twice"):
        plan(*caches, data={"eval_fraction": 0.1}, eval_caches=caches[:1])
    with pytest.raises(InputError, match="holds out no sample"):
        plan(*caches, data={"eval_fraction": 1e-9})
    with pytest.raises(InputError, match="no sample is left"):
        plan(*caches, data={"eval_fraction": 0.999999})
    with pytest.raises(ValueError, match="not all be 0"):
        TrainConfig.model_validate({"data": {"weights": [0.0, 0.0]}})


def test_an_eval_cache_that_is_also_trained_on_is_pointed_out(caches):
    (warning,) = plan(caches[0], eval_caches=caches[1:]).warnings()
    assert "30 of 30 held-out samples are also in the caches that are trained on" in warning
    assert not plan(*caches, data={"eval_fraction": 0.3}).warnings()
