"""Acceptance under sampling: by hand, against drawing, and equal to greedy counting in the limit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rows import CPU32, Document, TinyHead, make_batch, tiny_drafter

from dflash_cache.train.config import EvalConfig
from dflash_cache.train.draft_head import DraftHead, draft_head, offsets
from dflash_cache.train.eval_report import EvalResult, report
from dflash_cache.train.evaluate import draft_row
from dflash_cache.train.loss import Head
from dflash_cache.train.metrics import walk_steps
from dflash_cache.train.sampled_acceptance import SampledCounts, Way, count_document, expected_walk, slot_acceptance, ways
from dflash_cache.train.tally import Tally

ALL = DraftHead(Head(torch.zeros(1, 1)))


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def test_an_accepted_token_has_the_mass_that_both_distributions_share():
    """sum(min(p, q)) = 0.2 + 0.3 + 0.2; the drafter's most likely token is the second, of which q is 0.3."""
    sampled, greedy = slot_acceptance([1.0], logits(0.2, 0.5, 0.3), logits(0.5, 0.3, 0.2), torch.tensor([0]), ALL)
    assert sampled.tolist() == pytest.approx([0.7], abs=1e-6)
    assert greedy.tolist() == pytest.approx([0.3], abs=1e-6)


def test_the_temperature_is_applied_to_both_before_they_are_compared():
    """At 0.5 both are squared: p = (1, 4)/5 and q = (9, 1)/10."""
    sampled, greedy = slot_acceptance([0.5], logits(1 / 3, 2 / 3), logits(0.75, 0.25), torch.tensor([0]), ALL)
    assert sampled.tolist() == pytest.approx([0.2 + 0.1], abs=1e-6)
    assert greedy.tolist() == pytest.approx([0.1], abs=1e-6)


def test_what_a_pruned_drafter_cannot_propose_is_never_accepted():
    """Of q = (0.5, 0.3, 0.2) the drafter keeps the last two: p over them, q not renormalised."""
    kept = draft_head(Head(torch.zeros(3, 1)), offsets(torch.tensor([1, 2])))
    sampled, greedy = slot_acceptance([1.0], logits(0.9, 0.1), logits(0.5, 0.3, 0.2), torch.tensor([0]), kept)
    assert sampled.tolist() == pytest.approx([0.3 + 0.1], abs=1e-6)
    assert greedy.tolist() == pytest.approx([0.3], abs=1e-6)


def test_zero_is_not_a_way_to_sample_and_every_other_temperature_is_two():
    assert ways([1.0, 0, 0.6, 1.0]) == (Way(0.6, "sampled"), Way(0.6, "greedy"), Way(1.0, "sampled"), Way(1.0, "greedy"))


def test_the_expected_length_is_the_sum_of_the_products_of_acceptances():
    found = count_document(np.array([4]), np.array([[0.5, 0.5, 1.0]]), np.ones((1, 3), bool))
    assert (found.steps, found.accepted, found.length_sum) == (1.0, 0.5 + 0.25 + 0.25, 1.0)
    assert found.to_dict(Way(1.0, "sampled"))["tau"] == 2.0


def test_a_slot_that_does_not_count_ends_the_block():
    found = count_document(np.array([4]), np.array([[0.5, 1.0, 1.0]]), np.array([[True, True, False]]))
    assert (found.accepted, found.full_blocks, found.count_S) == (0.5 + 0.5, 0, (1, 1, 0))


def test_lengths_are_made_per_block_never_from_mean_acceptances():
    """Two blocks, all or nothing: 1 in the mean. Mean acceptances of 0.5 and 0.5 would give 0.75."""
    found = count_document(np.array([4, 9]), np.array([[1.0, 1.0], [0.0, 0.0]]), np.ones((2, 2), bool))
    assert found.length_sum / found.blocks == 1.0


def test_the_expected_walk_is_the_greedy_walk_where_acceptance_is_certain():
    rows, streaks = [2, 3, 4, 7, 8, 9, 10], [1, 0, 0, 2, 0, 0, 0]
    accept = (np.arange(3) < np.array(streaks)[:, None]).astype(float)
    assert expected_walk(np.array(rows), accept).tolist() == [float(step) for step in walk_steps(rows, streaks)]


def test_the_expected_walk_agrees_with_drawing():
    seeded = np.random.default_rng(0)
    rows, accept = np.array([1, 2, 3, 4, 5, 9, 10, 11]), seeded.random((8, 3))
    visits = np.zeros(8)
    for _ in range(20_000):
        draws = seeded.random((8, 3)) < accept
        visits += walk_steps(rows.tolist(), draws.cumprod(1).sum(1).tolist())
    assert expected_walk(rows, accept) == pytest.approx(visits / 20_000, abs=0.02)


def test_counts_add_up_and_nothing_adds_nothing():
    one = count_document(np.array([4]), np.array([[0.5, 0.5]]), np.ones((1, 2), bool))
    assert SampledCounts() + one == one + SampledCounts() == one
    assert (one + one).blocks == 2


def evaluated(batch, temperatures: list[float], chunk: int = 256, **drafter) -> EvalResult:
    model = tiny_drafter(**drafter)
    if model.d2t is not None:
        model.d2t.copy_(offsets(torch.arange(4, 4 + len(model.d2t))))
    tally = Tally(model.spec, ways(temperatures))
    with torch.no_grad():
        tally.add(batch, [True] * len(batch.sample_ids), *draft_row(model, TinyHead(), batch, CPU32, chunk, temperatures))
    return report(tally, EvalConfig(resamples=20))


@pytest.fixture
def batch():
    return make_batch([Document(24, seed=1), Document(9, seed=2, next_token=5), Document(17, seed=3)], 64)


def test_a_temperature_near_zero_expects_what_greedy_counts(batch):
    found = evaluated(batch, [1e-4])
    for cold in found.by_temperature:
        assert cold["tau_walk"] == pytest.approx(found.tau_walk, abs=1e-6)
        assert cold["tau"] == pytest.approx(found.quality.tau, abs=1e-6)
        assert cold["acceptance_per_slot"] == pytest.approx(found.quality.accuracy_per_slot, abs=1e-6)
        assert cold["confidence"]["tau_walk"] == pytest.approx(found.certainty.tau_walk, abs=1e-6)


def test_chunks_and_pieces_of_logits_change_no_expectation(batch, monkeypatch: pytest.MonkeyPatch):
    whole = evaluated(batch, [0.7])
    monkeypatch.setattr("dflash_cache.train.evaluate.CACHED_LOGITS_ROWS", 3)
    pieces = evaluated(batch, [0.7], chunk=5)
    for ours, theirs in zip(whole.by_temperature, pieces.by_temperature):
        assert ours["tau_walk"] == pytest.approx(theirs["tau_walk"], abs=1e-6)
        assert ours["acceptance_per_slot"] == pytest.approx(theirs["acceptance_per_slot"], abs=1e-6)
    assert whole.quality == pieces.quality


def test_every_slot_is_held_against_the_distribution_of_its_own_teacher_row(batch):
    """A greedy draft is accepted with q of one token of that very row, of the likeliest exactly where it is right."""
    head, drafter = TinyHead(), tiny_drafter()
    with torch.no_grad():
        (blocks,) = draft_row(drafter, head, batch, CPU32, 256, [0.9])
        q_TV = torch.softmax(head.teacher_logits(batch.verifier) / 0.9, -1)
    assert blocks.accept_UAS is not None
    best_T = q_TV.max(-1).values  # of greedy drafts at most this much is accepted
    for anchor, row in enumerate(blocks.row_A.tolist()):
        for slot in range(3):
            if blocks.carries_AS[anchor, slot]:
                greedy = blocks.accept_UAS[1, anchor, slot].item()
                assert any(abs(greedy - q) < 1e-5 for q in q_TV[row + slot].tolist())
                assert (abs(greedy - best_T[row + slot].item()) < 1e-5) == bool(blocks.right_AS[anchor, slot])
            else:
                assert blocks.accept_UAS[:, anchor, slot].tolist() == [0.0, 0.0]


def test_a_pruned_drafter_is_evaluated_at_a_temperature(batch):
    found = evaluated(batch, [1.0], draft_vocab_size=6)
    assert all(0 <= share <= 1 for each in found.by_temperature for share in each["acceptance_per_slot"])
