"""The recorder of an engine's drafts, and what is refused before an engine starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash_cache.common.errors import InputError
from dflash_cache.extract.draft_recorder import DraftRecorder
from dflash_cache.extract.draft_replay import replay_drafts


class Buffered:
    """A proposer that fills one buffer again and again, as vLLM's second model runner does."""

    def __init__(self) -> None:
        self.buffer, self.calls = torch.zeros(1, 3, dtype=torch.int64), 0

    def propose(self, *, step: int) -> torch.Tensor:
        self.calls += 1
        return self.buffer.fill_(step)


@pytest.mark.parametrize("name", ["drafter", "speculator"])
def test_every_proposal_is_kept_as_it_was_when_it_was_made(name: str):
    worker, proposer = DraftRecorder(), Buffered()
    worker.model_runner = SimpleNamespace(**{name: proposer})
    proposer.propose(step=9)  # a warm-up, before anybody asked
    assert worker.dflash_record_drafts()
    for step in (1, 2):
        assert proposer.propose(step=step).tolist() == [[step] * 3]  # the engine gets what it would get
    assert worker.dflash_take_drafts() == [[1, 1, 1], [2, 2, 2]]
    assert worker.dflash_take_drafts() == []
    assert proposer.calls == 3


def test_a_worker_that_drafts_nothing_says_so():
    worker = DraftRecorder()
    worker.model_runner = SimpleNamespace()
    assert not worker.dflash_record_drafts()
    assert worker.dflash_take_drafts() == []


def test_another_target_than_the_caches_is_refused_before_it_is_loaded(tiny_llama: Path, tmp_path: Path):
    with pytest.raises(InputError, match="is not the target of the cache"):
        replay_drafts(str(tiny_llama), tmp_path, [([1, 2], 3)], content_hash="0" * 64)
    with pytest.raises(InputError, match="is not to be set"):
        replay_drafts(str(tiny_llama), tmp_path, [([1, 2], 3)], engine_args={"worker_extension_cls": "mine"})
