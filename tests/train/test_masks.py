"""Masks: the rule of drafter.md written out by hand, and its two forms."""

from __future__ import annotations

import pytest
import torch
from rows import Document, make_batch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from dflash_cache.train import masks
from dflash_cache.train.anchors import pad_anchors
from dflash_cache.train.attention import attend
from dflash_cache.train.masks import block_mask, dense_mask, mask_rule, queries, query_positions, segment_mask

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


@pytest.mark.parametrize("window", [None, 30])
def test_flex_attention_compiles_with_the_rule_and_equals_the_dense_mask(window: int | None):
    """The compiler takes only rules that change nothing in place; eager flex attention takes any."""
    batch = make_batch([Document(130), Document(100)], 256)
    anchors = pad_anchors(torch.tensor([5, 40, 100, 150, 200]), 8)
    of = queries(anchors.row_A, anchors.keep_A, batch.document_T, BLOCK)
    query, key, value = (torch.randn(1, 2, size, 16, generator=torch.Generator().manual_seed(size)) for size in (24, 280, 281))
    value = value[:, :, :280]
    compiled = torch.compile(flex_attention, dynamic=False)
    with torch.no_grad():
        found = compiled(query, key, value, block_mask=block_mask(of, batch.document_T, window))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense_mask(of, batch.document_T, window))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rows_of_one_shape_are_compiled_once_whatever_their_documents_and_anchors():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(create_mask, backend=counter)
    for number in range(6):
        batch = make_batch([Document(5 + number), Document(9)], 24)
        anchors = pad_anchors(torch.arange(1, 3 + number), 8)
        of = queries(anchors.row_A, anchors.keep_A, batch.document_T, BLOCK)
        found = compiled(mask_rule(of, batch.document_T, None), 1, 1, 24, 48, device="cpu")
        assert torch.equal(found[0, 0], dense_mask(of, batch.document_T, None))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("blocks", [1, 2, 32])
def test_the_pieces_together_are_the_dense_mask_and_attend_to_the_same(window: int | None, blocks: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masks, "SEGMENT_BLOCKS", blocks)
    batch = make_batch([Document(5), Document(2), Document(9)], 18)
    anchors = pad_anchors(torch.tensor([0, 3, 4, 5, 6, 11, 14]), 9)
    of = queries(anchors.row_A, anchors.keep_A, batch.document_T, BLOCK)
    dense = dense_mask(of, batch.document_T, window)
    pieces, whole = segment_mask(of, batch.document_T, window), torch.zeros_like(dense)
    for piece in pieces:
        rows = piece.rows.stop - piece.rows.start
        whole[piece.queries, piece.rows] = piece.mask[:, :rows]
        whole[piece.queries, 18 + piece.queries.start : 18 + piece.queries.stop] = piece.mask[:, rows:]
    assert torch.equal(whole, dense)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(*shape, 4, generator=generator) for shape in ((27, 4), (45, 2), (45, 2)))
    torch.testing.assert_close(attend(query, key, value, pieces), attend(query, key, value, dense))
