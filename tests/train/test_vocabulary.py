"""The pruned vocabulary: which tokens are kept, the way there and back, and what a label outside does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rows import CPU32, Document, TinyHead, V, make_batch, tiny_drafter
from tiny_run import config

from dflash_cache.common.errors import InputError
from dflash_cache.train import checkpoint
from dflash_cache.train.checkpoint import CheckpointState
from dflash_cache.train.config import LossConfig, TrainConfig
from dflash_cache.train.draft_head import OUTSIDE, draft_head, is_kept, offsets
from dflash_cache.train.evaluate import draft_row
from dflash_cache.train.export import export, load_drafter
from dflash_cache.train.loss import Head
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.step import StepSeeds, row_loss
from dflash_cache.train.vocabulary import coverage, kept_tokens, supervised_counts


def counts(**of: int) -> np.ndarray:
    found = np.zeros(32, np.int64)
    for name, count in of.items():
        found[int(name[1:])] = count
    return found


def test_the_most_frequent_tokens_are_kept_and_the_lowest_ids_fill_up():
    """Ten distinct tokens and room for 16: six more, the lowest that are not used."""
    used = {f"t{token}": token for token in range(10, 20)}
    assert kept_tokens(counts(**used), 16).tolist() == [0, 1, 2, 3, 4, 5, *range(10, 20)]
    assert kept_tokens(counts(**used), 3).tolist() == [17, 18, 19]
    assert kept_tokens(counts(t5=2, t9=2, t7=2), 2).tolist() == [5, 7]


def test_the_choice_is_the_same_in_every_process():
    code = "import numpy as np; from dflash_cache.train.vocabulary import kept_tokens; print(kept_tokens(np.arange(40) % 3, 17).tolist())"
    found = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": str(seed)}, capture_output=True, check=True).stdout for seed in (1, 2)
    }
    assert len(found) == 1


@pytest.mark.parametrize("size", [0, 32, 100])
def test_a_size_that_prunes_nothing_is_refused(size: int):
    with pytest.raises(InputError, match="smaller than the target's"):
        kept_tokens(counts(), size)


def test_prompts_do_not_count_and_next_tokens_do(write_cache):
    cache, _, samples = write_cache(lengths=[12, 9], next_token=30)
    expected = np.bincount(np.concatenate([s.input_ids[s.loss_mask.astype(bool)] for s in samples]), minlength=32)
    expected[30] += 2
    assert supervised_counts([CacheReader(cache)]).tolist() == expected.tolist()
    assert supervised_counts([CacheReader(cache)] * 2).tolist() == (2 * expected).tolist()
    assert coverage(expected, np.array([30])) == expected[30] / expected.sum()


def test_tokens_of_samples_that_are_held_out_choose_no_vocabulary(write_cache):
    cache, _, samples = write_cache(lengths=[12, 9, 15], next_token=30)
    supervised = samples[1].input_ids[samples[1].loss_mask.astype(bool)]
    expected = np.bincount([*supervised, 30], minlength=32)
    assert supervised_counts([CacheReader(cache)], [np.array([True, False, True])]).tolist() == expected.tolist()


def test_mappings_are_offsets_and_a_mask_and_lead_back():
    kept = torch.tensor([3, 7, 9])
    assert offsets(kept).tolist() == [3, 6, 7]
    assert is_kept(offsets(kept), 12).nonzero().flatten().tolist() == [3, 7, 9]
    own = draft_head(Head(torch.arange(24.0).view(12, 2)), offsets(kept))
    assert own.head.weight_VH.tolist() == [[6.0, 7.0], [14.0, 15.0], [18.0, 19.0]]
    assert own.to_tokens(torch.tensor([1, 0])).tolist() == [7, 3]
    assert own.to_draft(torch.tensor([3, 5, 7, 9, 11, 0])).tolist() == [0, OUTSIDE, 1, 2, OUTSIDE, OUTSIDE]


def labelled(config: LossConfig, kept: list[int], ids: list[int]):
    drafter = tiny_drafter(draft_vocab_size=len(kept))
    drafter.d2t.copy_(offsets(torch.tensor(kept)))
    batch = make_batch([Document(len(ids), ids=ids, supervised=[1] * len(ids))])
    head = TinyHead()
    return row_loss(
        drafter, drafter.spec, head, batch, config, CPU32, StepSeeds.at(0, 0, 0, 0, CPU32.device), None, draft_head(head.head, drafter.d2t)
    )


def test_a_label_outside_carries_no_loss_and_counts_as_a_mistake():
    """Text 4 5 4 5: anchors 0, 1, 2 with three, two and one slots, whose labels are 5 4 5 | 4 5 | 5. Only 4 is kept."""
    row = labelled(LossConfig(label="data", position_weights="none"), [3, 4, 9], [4, 5, 4, 5])
    assert float(row.sums.weight_sum) == 2.0
    assert row.sums.counts.count_S.tolist() == [3, 2, 1]
    assert int(row.sums.counts.blocks) == 3
    assert int(row.sums.counts.right_S[0]) <= 1
    assert row.sums.counts.right_S.tolist()[2] == 0


def test_a_row_whose_labels_all_lie_outside_counts_its_mistakes_and_learns_nothing():
    row = labelled(LossConfig(label="data"), [3, 9], [4, 5, 4, 5])
    assert row.loss is None
    assert (float(row.sums.weight_sum), row.sums.counts.count_S.tolist(), row.sums.counts.right_S.tolist()) == (0.0, [3, 2, 1], [0, 0, 0])


def test_a_pruned_drafter_never_trains_with_the_whole_head():
    drafter = tiny_drafter(draft_vocab_size=4)
    with pytest.raises(AssertionError, match="its own head"):
        row_loss(drafter, drafter.spec, TinyHead(), make_batch([Document(8)]), LossConfig(), CPU32, StepSeeds.at(0, 0, 0, 0, CPU32.device))


def test_evaluation_proposes_token_ids_not_rows_of_the_head(monkeypatch: pytest.MonkeyPatch):
    """A head of one kept token proposes it everywhere: right exactly where the text or the target has it."""
    drafter, head = tiny_drafter(draft_vocab_size=1), TinyHead()
    drafter.d2t.fill_(7)
    batch = make_batch([Document(6, ids=[7, 5, 7, 7, 5, 7], supervised=[1] * 6)])
    (blocks,) = draft_row(drafter, head, batch, CPU32, 16)
    assert blocks.right_data_AS.tolist() == [
        [False, True, True],
        [True, True, False],
        [True, False, True],
        [False, True, False],
        [True, False, False],
    ]


def test_a_checkpoint_keeps_the_mapping_and_the_zlab_format_refuses_it(tmp_path: Path):
    drafter = tiny_drafter(draft_vocab_size=3)
    drafter.d2t.copy_(offsets(torch.tensor([3, 7, 9])))
    state = CheckpointState(step=1, epoch=0, row=0, config=TrainConfig(), drafter=drafter.spec)
    checkpoint.save(tmp_path / "run", state, drafter.state_dict(), {}, 1)
    found = load_drafter(tmp_path / "run")
    assert (found.d2t.dtype, found.d2t.tolist(), found.spec.draft_vocab_size) == (torch.int64, [3, 6, 7], 3)
    with pytest.raises(InputError, match=r"(?s)no words for a draft vocabulary of 3 tokens.*speculators format"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_drafting_from_the_anchor_is_refused_by_the_zlab_format(tmp_path: Path):
    drafter = tiny_drafter(sample_from_anchor=True)
    checkpoint.save(
        tmp_path / "run", CheckpointState(step=1, epoch=0, row=0, config=TrainConfig(), drafter=drafter.spec), drafter.state_dict(), {}, 1
    )
    with pytest.raises(InputError, match="sample_from_anchor"):
        export(tmp_path / "run", tmp_path / "out")


def test_runs_in_turn_have_the_vocabulary_that_each_asked_for(write_cache, tmp_path: Path):
    """Twenty tokens, then all, then ten, from one cache: nothing of one run reaches the next."""
    from dflash_cache.train.run import run

    cache, _, _ = write_cache(lengths=[20, 30, 25])
    sizes = {}
    for size in (20, None, 10):
        tiny = config(model={"draft_vocab_size": size} if size else {}, optim={"steps": 1})
        run(tiny, [cache], tmp_path / f"run-{size}")
        drafter = load_drafter(tmp_path / f"run-{size}")
        sizes[size] = None if drafter.d2t is None else (len(drafter.d2t), kept_tokens(supervised_counts([CacheReader(cache)]), size).tolist())
        if drafter.d2t is not None:
            assert (drafter.d2t + torch.arange(size)).tolist() == sizes[size][1]
    assert [found and found[0] for found in sizes.values()] == [20, None, 10]


def test_a_vocabulary_of_all_tokens_is_refused_with_the_run(write_cache, tmp_path: Path):
    from dflash_cache.train.resolve import make_plan

    cache, _, _ = write_cache(lengths=[20])
    with pytest.raises(InputError, match="draft_vocab_size 32 prunes nothing"):
        make_plan(config(model={"draft_vocab_size": V}), [cache])


def test_a_soft_label_takes_the_teachers_distribution_over_what_is_kept():
    """The rest is left out before the softmax, so that the drafter can reach it."""
    own = draft_head(Head(torch.zeros(5, 2)), offsets(torch.tensor([1, 3])))
    logits = torch.tensor([[9.0, 1.0, 9.0, 2.0, 9.0]])
    torch.testing.assert_close(torch.softmax(own.kept_logits(logits), -1), torch.softmax(torch.tensor([[1.0, 2.0]]), -1))
    assert replace(own, kept_D=None).kept_logits(logits) is logits
