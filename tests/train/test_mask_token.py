"""The mask token: where it comes from, and what may never be one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_cache.common.errors import InputError
from dflash_cache.train.mask_token import MaskToken, TokenTable, choose


def table(**changes: Any) -> TokenTable:
    roles = {"pad_token_id": 2, "bos_token_id": 1, "eos_token_ids": (3,), "special_token_ids": (0, 1, 2, 3, 9)}
    values: dict[str, Any] = {"vocab_size": 12, "tokenizer_size": 10, **roles}
    return TokenTable(**{**values, **changes})


def counts(*used: int, size: int = 12) -> list[np.ndarray]:
    return [np.bincount(used, minlength=size)]


def test_the_tokenizers_own_mask_token_comes_first():
    assert choose(table(mask_token_id=9), counts(5), None) == MaskToken(9, "the tokenizer's mask token")


def test_then_the_first_padding_row():
    assert choose(table(), counts(5), None).id == 10
    assert choose(table(mask_token_id=9), counts(9), None).id == 10
    assert choose(table(), counts(10), None).id == 11


def test_then_the_lowest_unused_special_token_that_has_no_role():
    assert choose(table(tokenizer_size=12), counts(0, 5), None).id == 9
    assert choose(table(tokenizer_size=12), counts(5), None).id == 0


def test_with_nothing_left_the_error_asks_for_one():
    with pytest.raises(InputError, match=r"--set model\.mask_token_id="):
        choose(table(tokenizer_size=12), counts(0, 9), None)


@pytest.mark.parametrize(("token", "why"), [(12, "no row"), (3, "eos"), (2, "pad"), (1, "bos"), (5, "occurs in the data")])
def test_an_override_that_cannot_work_is_refused(token: int, why: str):
    with pytest.raises(InputError, match=why):
        choose(table(), counts(5), token)


def test_a_good_override_is_taken():
    assert choose(table(mask_token_id=9), counts(5), 7) == MaskToken(7, "as configured")


def test_all_caches_count():
    assert choose(table(), [*counts(10), *counts(4)], None).id == 11
    with pytest.raises(InputError, match="occurs"):
        choose(table(), [*counts(4), *counts(7)], 7)
