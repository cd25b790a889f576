"""Documents come back as they went in, whatever their number, and their memory does not grow with their length."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from dflash_cache.common.errors import DiskFull
from dflash_cache.extract.document_store import DocumentStore
from dflash_cache.extract.engine import Document


def document(number: int, length: int) -> Document:
    rng = np.random.default_rng(number)
    ids, mask = rng.integers(0, 1 << 20, length).astype(np.int32), rng.integers(0, 2, length).astype(np.uint8)
    return Document(number.to_bytes(16, "little"), f"source-{number % 3}", number * 7, ids, mask)


def same(one: Document, two: Document) -> bool:
    arrays = np.array_equal(one.input_ids, two.input_ids) and np.array_equal(one.loss_mask, two.loss_mask)
    return arrays and (one.key, one.source, one.source_row) == (two.key, two.source, two.source_row)


def test_documents_come_back_in_any_order_even_while_others_are_added(tmp_path):
    store, given = DocumentStore(tmp_path), [document(number, 1 + number % 50) for number in range(200)]
    for number, one in enumerate(given):
        store.add(one)
        assert same(store[number // 2], given[number // 2])
    order = np.random.default_rng(0).permutation(200).tolist()
    assert all(same(found, given[number]) for found, number in zip(store.take(order), order, strict=True))
    assert [store.key(3), store.place(4)] == [given[3].key, ("source-1", 28)]
    assert store.tokens == sum(map(len, given))
    assert store.supervised_tokens == sum(int(one.loss_mask.sum()) for one in given)
    assert list(tmp_path.iterdir()) == []  # the file has no name, so nothing is left behind


def test_a_full_disk_is_said_as_such(tmp_path, monkeypatch):
    store = DocumentStore(tmp_path)

    class Full:
        def tell(self) -> int:
            return 0

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "_file", Full())
    with pytest.raises(DiskFull):
        store.add(document(0, 5))
