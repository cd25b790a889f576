"""Offline evaluation: an oracle, a constant drafter, and that chunks and packing change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rows import CPU32, Document, TinyHead, make_batch, tiny_drafter
from tiny_run import config

from dflash_cache.common.errors import InputError
from dflash_cache.train import evaluate as module
from dflash_cache.train.config import EvalConfig
from dflash_cache.train.evaluate import Tally, draft_row, evaluate
from dflash_cache.train.export import export
from dflash_cache.train.run import run

CPU = EvalConfig(device="cpu", dtype="float32")


@pytest.fixture
def trained(write_cache, tmp_path: Path) -> tuple[Path, Path]:
    """(run, held-out cache)."""
    cache, _, _ = write_cache(name="train")
    run(config(optim={"steps": 3}), [cache], tmp_path / "run")
    held_out, _, _ = write_cache(name="held-out", lengths=[12, 30, 3, 21], seed=9, next_token=7)
    return tmp_path / "run", held_out


def predicting(monkeypatch: pytest.MonkeyPatch, predict) -> None:
    """Replace the drafter's tokens by predict(anchors, carries) -> [A, B-1]."""
    monkeypatch.setattr(module, "_predict", lambda drafter, head, draft_head, inputs, anchors, carries, compute: predict(anchors, carries))


def tally(batch, chunk: int = 256) -> Tally:
    drafter = tiny_drafter()
    found = Tally(drafter.spec)
    with torch.no_grad():
        found.add(batch, [True] * len(batch.sample_ids), *draft_row(drafter, TinyHead(), batch, CPU32, chunk))
    return found


def test_an_oracle_reaches_the_block_size(monkeypatch: pytest.MonkeyPatch):
    """21 tokens after the prompt, blocks of 4: the first comes with the prefill, then five steps of 4."""
    batch = make_batch([Document(24, supervised=[0] * 3 + [1] * 21)])
    teacher = TinyHead().teacher_tokens(torch.from_numpy(batch_states(batch)))
    offsets = torch.arange(3)
    predicting(monkeypatch, lambda anchors, carries: teacher[(anchors.row_A[:, None] + offsets).clamp(max=23)])
    found = tally(batch).result(())
    assert (found.walk.steps, found.walk.accepted, found.tau_walk) == (5, 15, 4.0)
    assert found.quality.accuracy == 1.0
    assert found.quality.tau_full == 4.0


def batch_states(batch):
    return batch.verifier.float().numpy()


def test_a_drafter_that_is_never_right_reaches_1(monkeypatch: pytest.MonkeyPatch):
    batch = make_batch([Document(24, supervised=[0] * 3 + [1] * 21)])
    predicting(monkeypatch, lambda anchors, carries: torch.full(carries.shape, -5))
    found = tally(batch).result(())
    assert (found.walk.steps, found.walk.accepted, found.tau_walk) == (20, 0, 1.0)
    assert found.data_tau_walk == 1.0


def test_the_walk_against_the_text_uses_the_text(monkeypatch: pytest.MonkeyPatch):
    batch = make_batch([Document(24, supervised=[0] * 3 + [1] * 21)])
    following = batch.next_ids_T
    predicting(monkeypatch, lambda anchors, carries: following[(anchors.row_A[:, None] + torch.arange(3)).clamp(max=23)])
    found = tally(batch).result(())
    assert found.data_tau_walk == 4.0
    assert found.tau_walk < 2


def test_every_valid_anchor_is_drafted_whatever_the_chunks():
    batch = make_batch([Document(24, seed=1), Document(9, seed=2, next_token=5), Document(20, seed=3, supervised=[0] * 19 + [1])], 64)
    results = [tally(batch, chunk).result(()) for chunk in (1, 7, 256)]
    assert results[0] == results[1] == results[2]
    assert results[0].quality.blocks == (22 - 1) + 7
    assert results[0].documents_without_anchor == 1


def test_documents_alone_and_packed_give_the_same():
    documents = [Document(24, seed=1), Document(9, seed=2, next_token=5)]
    packed = tally(make_batch(documents, 40)).result(())
    apart = Tally(tiny_drafter().spec)
    for document in documents:
        batch = make_batch([document])
        with torch.no_grad():
            apart.add(batch, [True], *draft_row(tiny_drafter(), TinyHead(), batch, CPU32, 256))
    assert apart.result(()) == packed


def test_a_run_and_its_export_evaluate_to_the_same_acceptance_length(trained: tuple[Path, Path], tmp_path: Path):
    folder, held_out = trained
    export(folder, tmp_path / "drafter", dtype="float32")
    first, second = evaluate(folder, [held_out], CPU), evaluate(tmp_path / "drafter", [held_out], CPU)
    assert first.to_dict() == second.to_dict()
    assert (first.documents, first.block_size) == (4, 4)
    assert "acceptance length" in first.to_text()
    assert first.walk_by_source["data.jsonl"] == first.walk


def test_a_limit_takes_the_first_documents(trained: tuple[Path, Path]):
    folder, held_out = trained
    found = evaluate(folder, [held_out], CPU, limit=2)
    assert found.documents == 2
    assert found.quality.blocks == (12 - 4) + (30 - 10)
    whole = evaluate(folder, [held_out], CPU)
    assert whole.quality.blocks == (12 - 4) + (30 - 10) + (3 - 1) + (21 - 7)


def test_a_drafter_of_another_target_is_refused(trained: tuple[Path, Path], write_cache):
    folder, _ = trained
    other, _, _ = write_cache(name="other", vocab=64)
    with pytest.raises(InputError, match="another target"):
        evaluate(folder, [other], CPU)


def test_a_cache_that_lacks_the_drafters_layers_is_refused(trained: tuple[Path, Path], write_cache):
    folder, _ = trained
    other, _, _ = write_cache(name="other", layer_ids=(1, 2))
    with pytest.raises(InputError, match="not all in the cache"):
        evaluate(folder, [other], CPU)
