"""Whole conversations with real engines: what is stored is what asking turn by turn gives. Two starts of vLLM in all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
from forked import samples_by_key
from talker import ROWS, build_talker, check_all, supervised

from dflash_cache.common.errors import RunFailed
from dflash_cache.common.sample import Sample
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.rejects import load_rejects
from dflash_cache.extract.run import run
from dflash_cache.train.verify import verify


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_talker(tmp_path_factory.mktemp("talker"))


def settings(target: Path, cache: Path, **fields: Any) -> ExtractConfig:
    data = tiny.write_jsonl(cache.with_suffix(".jsonl"), ROWS)
    given = {"model": str(target), "data": (str(data),), "cache": cache, "max_length": 512, "generate": True, "max_new_tokens": 24, "layers": (1, 3)}
    return ExtractConfig(**(given | fields))


def by_row(cache: Path) -> dict[int, Sample]:
    return {sample.source_row: sample for sample in samples_by_key(cache).values()}


def test_with_transformers_every_stored_conversation_is_the_targets_own(target: Path, tmp_path: Path, make_check: Any):
    summary = run(settings(target, tmp_path / "cache", engine="transformers"), make_check)
    stored = by_row(tmp_path / "cache")
    assert (summary.samples + summary.rejects, summary.fidelity_agreement) == (len(ROWS), 1.0)
    assert check_all(stored, target) > 1.5 * len(stored) > 15
    assert summary.supervised_tokens == supervised(stored) < summary.generated_tokens


def test_sampled_conversations_are_the_same_each_time_and_others_by_another_seed(target: Path, tmp_path: Path):
    caches = []
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        run(settings(target, tmp_path / name, engine="transformers", temperature=1.0, top_p=0.9, top_k=10, seed=seed, max_rejects=1.0))
        caches.append({sample.key: sample.input_ids.tolist() for sample in samples_by_key(tmp_path / name).values()})
    one, two, other = caches
    assert one == two
    assert len(one.keys() & other.keys()) > 5
    assert any(one[key] != other[key] for key in one.keys() & other.keys())


@pytest.mark.vllm
def test_with_vllm_a_run_that_was_stopped_in_the_middle_is_completed_to_the_targets_own_conversations(target: Path, tmp_path: Path, make_check: Any):
    def stopping(cache: Path) -> Any:
        check, seen = make_check(cache), 0

        def count(bits: np.ndarray, top1: np.ndarray) -> np.ndarray:
            nonlocal seen
            seen += len(top1)
            if seen > 8:
                raise RunFailed("stopped", place="here")
            return check(bits, top1)

        return count

    config = settings(target, tmp_path / "cache", part_tokens=100, chunk_tokens=32, engine_args={"max_num_seqs": 3})
    with pytest.raises(RunFailed, match="stopped"):
        run(config, stopping)
    first = samples_by_key(config.cache)
    summary = run(config, make_check)
    stored = by_row(config.cache)
    assert 0 < len(first) == summary.already_stored < len(stored)
    assert first.keys() < samples_by_key(config.cache).keys()
    assert summary.samples + summary.already_stored + summary.rejects == len(ROWS)
    assert summary.fidelity_agreement == 1.0
    assert verify(config.cache).ok
    assert check_all(stored, target) > 1.5 * len(stored) > 15
    assert {reject.row for reject in load_rejects(config.cache)} == set(range(len(ROWS))) - stored.keys()
