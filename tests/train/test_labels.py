"""Labels: the row that teaches each slot, and where blocks end."""

from __future__ import annotations

import torch
from rows import Document, make_batch

from dflash_cache.train.labels import SlotLabels, slot_labels


def labels(
    documents: list[Document], anchors: list[int], block_size: int = 4, keep: list[bool] | None = None, row_tokens: int | None = None
) -> SlotLabels:
    batch = make_batch(documents, row_tokens)
    kept = torch.tensor(keep or [True] * len(anchors))
    return slot_labels(torch.tensor(anchors), kept, batch.document_T, batch.next_ids_T, batch.next_supervised_T, block_size - 1)


def test_slot_k_is_taught_by_row_a_plus_k_minus_1_and_its_token_is_that_at_a_plus_k():
    found = labels([Document(10, supervised=[1] * 10, ids=range(10, 20))], [2])
    assert found.teacher_row_AS.tolist() == [[2, 3, 4]]
    assert found.data_AS.tolist() == [[13, 14, 15]]
    assert found.carries_AS.all()


def test_no_slot_beyond_the_documents_end_carries_loss():
    found = labels([Document(6, supervised=[1] * 6, ids=range(10, 16))], [3])
    assert found.carries_AS.tolist() == [[True, True, False]]
    assert found.data_AS.tolist() == [[14, 15, -1]]


def test_a_known_next_token_is_one_more_label():
    found = labels([Document(6, supervised=[1] * 6, ids=range(10, 16), next_token=30)], [3, 5])
    assert found.carries_AS.tolist() == [[True, True, True], [True, False, False]]
    assert found.data_AS.tolist() == [[14, 15, 30], [30, -1, -1]]
    assert found.teacher_row_AS.tolist() == [[3, 4, 5], [5, 5, 5]]


def test_no_label_comes_from_the_next_document_though_it_starts_supervised():
    found = labels([Document(6, supervised=[1] * 6, ids=range(10, 16)), Document(5, supervised=[1] * 5, ids=range(20, 25))], [4])
    assert found.carries_AS.tolist() == [[True, False, False]]
    assert found.data_AS.tolist() == [[15, -1, -1]]


def test_a_block_stops_at_the_first_unsupervised_slot():
    found = labels([Document(10, supervised=[1, 1, 1, 1, 0, 1, 1, 1, 1, 1], ids=range(10, 20))], [2], block_size=6)
    assert found.carries_AS.tolist() == [[True, False, False, False, False]]


def test_padding_anchors_carry_nothing():
    found = labels([Document(10, supervised=[1] * 10)], [2, 0], keep=[True, False])
    assert found.carries_AS.tolist() == [[True] * 3, [False] * 3]


def test_lengths_need_not_divide_the_block():
    for length in (17, 18, 19):
        found = labels([Document(length, supervised=[1] * length)], list(range(length - 1)), row_tokens=24)
        assert found.carries_AS.sum(1).tolist() == [3] * (length - 3) + [2, 1]
