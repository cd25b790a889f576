"""Anchors: which rows may be one, how many are drawn, and that drawing is uniform."""

from __future__ import annotations

import pytest
import torch
from rows import Document, make_batch

from dflash_cache.train.anchors import candidate_rows, draw_anchors, pad_anchors
from dflash_cache.train.batch import Batch


def draw(batch: Batch, per_document: int = 512, per_row: int = 1024, seed: int = 0, pad_multiple: int = 1) -> list[int]:
    anchors = draw_anchors(
        batch.document_T,
        batch.loss_mask_T,
        batch.next_supervised_T,
        per_document=per_document,
        per_row=per_row,
        generator=torch.Generator().manual_seed(seed),
        pad_multiple=pad_multiple,
    )
    return anchors.row_A[anchors.keep_A].tolist()


def candidates(*documents: Document, row_tokens: int | None = None) -> list[int]:
    batch = make_batch(documents, row_tokens)
    return candidate_rows(batch.document_T, batch.loss_mask_T, batch.next_supervised_T).tolist()


def test_an_anchor_is_supervised_and_followed_by_a_supervised_token_of_its_document():
    assert candidates(Document(10, supervised=[0, 0, 0, 1, 1, 1, 0, 1, 0, 1])) == [3, 4]


def test_the_last_row_is_an_anchor_only_when_its_next_token_is_known():
    assert candidates(Document(4, supervised=[0, 0, 1, 1])) == [2]
    assert candidates(Document(4, supervised=[0, 0, 1, 1], next_token=7)) == [2, 3]


def test_a_supervised_start_of_the_next_document_makes_no_anchor_of_the_last_row():
    first, second = Document(4, supervised=[0, 0, 0, 1]), Document(4, supervised=[1, 1, 0, 0])
    assert candidates(first, second, row_tokens=12) == [4]


def test_only_the_last_token_supervised_gives_none_and_exactly_one_is_used():
    assert draw(make_batch([Document(20, supervised=[0] * 19 + [1])])) == []
    assert draw(make_batch([Document(20, supervised=[0] * 18 + [1, 1])])) == [18]


@pytest.mark.parametrize("packed", [True, False])
def test_anchors_are_counted_per_document_not_per_row(packed: bool):
    short, long = Document(14, supervised=[0] * 3 + [1] * 11), Document(1010, supervised=[0] * 9 + [1] * 1001)
    rows = [[short, long]] if packed else [[short], [long]]
    counts = [int((make_batch(row).document_T[draw(make_batch(row), per_document=64)] == number).sum()) for row in rows for number in range(len(row))]
    assert counts == [10, 64]


def test_anchors_are_ascending_different_and_depend_on_the_generator_alone():
    batch = make_batch([Document(200), Document(100)], 320)
    once, again, other = draw(batch, 50, seed=1), draw(batch, 50, seed=1), draw(batch, 50, seed=2)
    assert once == sorted(set(once)) == again
    assert once != other
    assert len(once) == 100


def test_drawing_is_uniform_within_a_document_also_when_the_row_is_thinned():
    batch = make_batch([Document(8, supervised=[1] * 8), Document(14, supervised=[1] * 14)])
    hits = torch.zeros(22)
    for seed in range(4000):
        hits[draw(batch, per_document=5, per_row=6, seed=seed)] += 1
    first, second = hits[:7], hits[8:21]
    assert hits[7] == hits[21] == 0
    # 5 + 5 drawn, thinned to 6: each document keeps 3 on average
    assert first.sum() / 4000 == pytest.approx(3, abs=0.05)
    assert second.sum() / 4000 == pytest.approx(3, abs=0.05)
    assert (first / 4000 - 3 / 7).abs().max() < 0.035
    assert (second / 4000 - 3 / 13).abs().max() < 0.035


def test_the_row_limit_holds():
    assert len(draw(make_batch([Document(30), Document(30)]), per_row=7)) == 7


def test_padding_comes_at_the_end_and_is_marked():
    anchors = pad_anchors(torch.tensor([3, 5, 9]), 4)
    assert anchors.row_A.tolist() == [3, 5, 9, 0]
    assert anchors.keep_A.tolist() == [True, True, True, False]
    assert len(pad_anchors(torch.tensor([], dtype=torch.int64), 4)) == 0
