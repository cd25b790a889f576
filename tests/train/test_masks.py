"""Masks: the rule of drafter.md written out by hand, and its two forms."""

from __future__ import annotations

import pytest
import torch
from dflash_cache.train.anchors import pad_anchors
from dflash_cache.train.masks import dense_mask, mask_rule, queries, query_positions
from rows import Document, make_batch
from torch.nn.attention.flex_attention import create_mask

BLOCK = 3


def by_hand(document: list[int], anchors: list[int], keep: list[bool], window: int | None) -> torch.Tensor:
    """One query and key after the other, straight from the definition."""
    length, mask = len(document), torch.zeros(len(anchors) * BLOCK, len(document) + len(anchors) * BLOCK, dtype=torch.bool)
    for block, (anchor, real) in enumerate(zip(anchors, keep)):
        for slot in range(BLOCK):
            query = block * BLOCK + slot
            for row in range(length):
                seen = real and document[row] == document[anchor] and row < anchor
                mask[query, row] = seen and (window is None or row > anchor + slot - window)
            for other in range(BLOCK):
                seen = window is None or (other <= slot and other > slot - window)
                mask[query, length + block * BLOCK + other] = seen
    return mask


@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
def test_dense_mask_and_flex_rule_are_the_definition(window: int | None):
    batch = make_batch([Document(5), Document(7)], 15)
    anchors = pad_anchors(torch.tensor([0, 3, 5, 6, 11]), 7)
    of = queries(anchors.row_A, anchors.keep_A, batch.document_T, BLOCK)
    dense = dense_mask(of, batch.document_T, window)
    assert torch.equal(dense, by_hand(batch.document_T.tolist(), anchors.row_A.tolist(), anchors.keep_A.tolist(), window))
    rule = create_mask(mask_rule(of, batch.document_T, window), 1, 1, *dense.shape, device="cpu")
    assert torch.equal(rule[0, 0], dense)


@pytest.mark.parametrize("window", [None, 2])
def test_every_query_sees_a_key_of_its_own_block(window: int | None):
    batch = make_batch([Document(5)], 8)
    anchors = pad_anchors(torch.tensor([0]), 4)
    dense = dense_mask(queries(anchors.row_A, anchors.keep_A, batch.document_T, BLOCK), batch.document_T, window)
    assert dense[:, 8:].any(1).all()
    assert not dense[:, :8].any()  # anchor 0 has no context, padding sees none


def test_positions_restart_with_each_document_and_count_on_in_the_block():
    batch = make_batch([Document(5), Document(7)], 15)
    assert query_positions(torch.tensor([3, 7]), batch.position_T, BLOCK).tolist() == [3, 4, 5, 2, 3, 4]
