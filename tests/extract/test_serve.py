from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_target as tiny

from dflash_cache.common.errors import InputError
from dflash_cache.extract.config import ServeConfig
from dflash_cache.extract.serve import _Served, compare, evaluate_served, first_difference


@pytest.mark.parametrize(("one", "other", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([0], [], 0)])
def test_the_first_differing_token(one: list[int], other: list[int], place: int | None):
    assert first_difference(one, other) == place


def test_tau_is_one_more_than_the_accepted_tokens_of_a_draft():
    plain = _Served([[1, 2, 3, 4], [5, 6]], 2.0, {}, [])
    drafted = _Served([[1, 2, 3, 4], [5, 7]], 1.0, {"drafts": 4, "draft_tokens": 12, "accepted_tokens": 6}, [3, 2, 1])
    result = compare(plain, drafted, 3, {})
    assert result.tau == 2.5
    assert (result.tokens_per_second_without, result.tokens_per_second_with, result.speed_up) == (3.0, 6.0, 2.0)
    assert (result.differing_outputs, result.first_differences) == (1, [(1, 1)])
    json.dumps(result.to_dict())


def test_tau_is_unknown_when_nothing_was_drafted():
    served = _Served([[1]], 1.0, {}, [])
    assert compare(served, served, 3, {}).tau is None


def test_a_folder_that_is_no_drafter_is_refused(tiny_llama: Path, tmp_path: Path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat("hi")])
    with pytest.raises(InputError, match="is no exported drafter"):
        evaluate_served(ServeConfig(model=str(tiny_llama), drafter=tmp_path, data=(str(data),)))


@pytest.mark.vllm
def test_a_random_drafter_is_served_and_its_acceptance_is_counted(tiny_llama: Path, tmp_path: Path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat(f"question {number}", "unused") for number in range(4)] + ["broken"])
    drafter = tiny.build_drafter(tmp_path / "drafter", tiny_llama, block_size=4)
    result = evaluate_served(ServeConfig(model=str(tiny_llama), drafter=drafter, data=(str(data),), max_new_tokens=12, max_length=256))
    assert (result.prompts, result.num_speculative_tokens, sum(result.rejects.values())) == (4, 3, 1)
    assert result.drafts > 0
    assert result.draft_tokens == 3 * result.drafts
    assert len(result.accepted_per_position) == 3
    assert sum(result.accepted_per_position) == result.accepted_tokens
    assert result.tau == 1 + result.accepted_tokens / result.drafts
    assert 4 <= result.output_tokens_without <= 4 * 12
