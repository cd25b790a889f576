"""Layer ids: the formula's values, and every wrong request refused by name."""

from __future__ import annotations

import pytest

from dflash_cache.common.errors import InputError
from dflash_cache.common.layers import check_layer_ids, check_verifier_layer, default_layer_ids, layer_slots


@pytest.mark.parametrize(
    ("depth", "ids"), [(36, (1, 9, 17, 25, 33)), (64, (1, 16, 31, 46, 61)), (30, (1, 8, 14, 20, 27)), (4, (0, 1, 2)), (2, (0,)), (1, (0,))]
)
def test_the_default_is_the_formula_of_the_paper(depth, ids):
    assert default_layer_ids(depth) == ids


@pytest.mark.parametrize(("ids", "word"), [((1, 4), "0..3"), ((-1, 2), "-1"), ((1, 1, 2), "more than once: 1"), ((), "no layer")])
def test_a_wrong_choice_is_refused_with_value_and_fix(ids, word):
    with pytest.raises(InputError, match=word) as caught:
        check_layer_ids(ids, 4)
    assert "fix:" in str(caught.value)


def test_ids_are_stored_ascending_whatever_the_order():
    assert check_layer_ids((2, 0, 1), 4) == (0, 1, 2)


def test_the_verifier_layer_is_the_last_block_unless_forced():
    assert check_verifier_layer(None, 64, False) == 63
    assert check_verifier_layer(63, 64, False) == 63
    assert check_verifier_layer(61, 64, True) == 61
    for layer in (61, 64, -1):
        with pytest.raises(InputError, match="63"):
            check_verifier_layer(layer, 64, False)


def test_slots_point_at_the_wanted_layers_ascending():
    assert layer_slots((27, 1), (1, 14, 27), "here") == (0, 2)
    assert layer_slots(None, (1, 14, 27), "here") == (0, 1, 2)
    for wanted in ((2,), (1, 1), ()):
        with pytest.raises(InputError):
            layer_slots(wanted, (1, 14, 27), "here")
