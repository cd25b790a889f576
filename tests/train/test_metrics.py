"""Metrics: counted per block, then averaged; what is not supervised is no mistake."""

from __future__ import annotations

import torch

from dflash_cache.train.metrics import BlockCounts, Chain, Walk, chain, count_blocks, leading_right, quality, walk


def bools(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def test_perfect_blocks_of_4_have_streak_3_and_tau_4():
    found = quality(count_blocks(bools([[1, 1, 1]] * 2), bools([[1, 1, 1]] * 2)))
    assert (found.accuracy, found.streak, found.tau, found.tau_full) == (1.0, 3.0, 4.0, 4.0)


def test_streaks_are_means_over_blocks_not_products_of_accuracies():
    found = quality(count_blocks(bools([[1, 1, 1], [0, 1, 1]]), bools([[1, 1, 1]] * 2)))
    assert found.accuracy_per_slot == (0.5, 1.0, 1.0)
    assert found.streak == 1.5


def test_an_unsupervised_tail_ends_a_block_and_is_no_mistake():
    right, carries = bools([[1, 1, 0, 0], [1, 0, 1, 1]]), bools([[1, 1, 0, 0], [1, 1, 1, 1]])
    found = quality(count_blocks(right, carries))
    assert leading_right(right, carries).tolist() == [2, 1]
    assert (found.blocks, found.full_blocks) == (2, 1)
    assert (found.streak, found.tau_full) == (1.5, 2.0)
    assert found.accuracy == 5 / 6


def test_a_longer_block_does_not_lower_the_length_of_the_same_run():
    """Three right and the rest wrong, in blocks of 4 and of 8: the length is 3 in both, 4 with the bonus token."""
    for drafted in (4, 7):
        found = quality(count_blocks(bools([[1, 1, 1] + [0] * (drafted - 3)]), bools([[1] * drafted])))
        assert (found.streak, found.tau, found.tau_full) == (3.0, 4.0, 4.0)


def test_the_streak_is_the_sum_over_slots_of_the_share_of_blocks_that_reach_them():
    right = bools([[1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])
    found = quality(count_blocks(right, torch.ones_like(right)))
    assert found.streak == (3 + 2 + 1 + 1) / 4


def test_rows_of_different_size_add_as_counts_not_as_rates():
    """8 right of 10 and 18 of 20 are 26 of 30, not the mean of two rates."""

    def row(right: int, of: int) -> BlockCounts:
        return count_blocks(bools([[1]] * right + [[0]] * (of - right)), bools([[1]] * of))

    assert quality(row(8, 10) + row(18, 20)).accuracy_per_slot == (26 / 30,)


def test_padding_blocks_count_nothing():
    right, carries = bools([[1, 1], [0, 0]]), bools([[1, 1], [0, 0]])
    assert quality(count_blocks(right, carries)).blocks == 1


def test_counts_add_up_to_those_of_all_blocks_together():
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(12, 5, generator=generator) < 0.5
    carries = (torch.rand(12, 5, generator=generator) < 0.8).cumprod(1).bool()
    parts = BlockCounts.none(5)
    for start in range(0, 12, 5):
        parts += count_blocks(right[start : start + 5], carries[start : start + 5])
    assert quality(parts) == quality(count_blocks(right, carries))


def test_no_blocks_read_zero_and_tau_1():
    found = quality(BlockCounts.none(3))
    assert (found.accuracy, found.streak, found.tau) == (0.0, 0.0, 1.0)


def test_a_walk_takes_the_streak_and_the_bonus_token_and_starts_again_there():
    # anchors 4..9; from 4 two are right, so 7 is next; from 7 none, so 8; from 8 two, past the end
    assert walk([4, 5, 6, 7, 8, 9], [2, 9, 9, 0, 2, 9], 3) == Walk(3, 4, (2, 2, 0))
    assert walk([4, 5, 6, 7, 8, 9], [2, 9, 9, 0, 2, 9], 3).tau == 1 + 4 / 3


def test_a_walk_goes_on_at_the_next_turn():
    # the turn 2..4 ends inside the first step; the next turn's first anchor is 9
    assert walk([2, 3, 4, 9, 10], [2, 0, 0, 0, 1], 3) == Walk(3, 3, (2, 1, 0))


def test_a_walk_with_perfect_drafts_needs_one_step_in_block_size_tokens():
    anchors = list(range(12))  # 12 more tokens follow anchor 0, by blocks of 4
    streaks = [min(3, 12 - anchor) for anchor in anchors]
    assert walk(anchors, streaks, 3) == Walk(3, 9, (3, 3, 3))
    assert walk(anchors, [0] * 12, 3).tau == 1.0


def test_walks_add():
    assert Walk() + walk([0, 1], [1, 0], 2) + walk([0], [2], 2) == Walk(2, 3, (2, 1))


def test_conditional_acceptance_asks_only_blocks_whose_slots_before_are_right():
    """Slot 2 is right in 3 of 4 blocks, but of the 3 that reach it in 2; slot 3 is reached by 2, counts in 1 of them and is wrong there."""
    right = bools([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]])
    carries = bools([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    assert chain(right, carries).conditional == (3 / 4, 2 / 3, 0.0)
    assert chain(right, carries).reached_S.tolist() == [4, 3, 1]
    assert (chain(right, carries) + Chain.none(3)).accepted_S.tolist() == [3, 2, 0]


def test_the_mean_length_is_the_sum_of_the_products_of_conditional_acceptances_when_all_blocks_are_whole():
    right = torch.rand(50, 4, generator=torch.Generator().manual_seed(1)) < 0.6
    whole = torch.ones_like(right)
    products = torch.tensor(chain(right, whole).conditional, dtype=torch.float64).cumprod(0)
    assert abs(quality(count_blocks(right, whole)).streak - products.sum().item()) < 1e-12


def test_a_walks_acceptance_is_by_step_and_its_conditional_by_the_slot_before():
    found = Walk(8, 7, (4, 2, 1))
    assert (found.acceptance, found.conditional) == ((0.5, 0.25, 0.125), (0.5, 0.5, 0.5))
    assert found.to_dict()["accepted_per_step"] == found.tau - 1 == 7 / 8
    assert abs(1 + sum(found.acceptance) - found.tau) < 1e-9
