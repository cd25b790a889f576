"""One sample may differ among several; two per cent may differ among many."""

from __future__ import annotations

import pytest

from dflash_cache.common.agreement import too_many


@pytest.mark.parametrize(
    ("wrong", "samples", "verdict"),
    [(0, 0, False), (0, 5, False), (1, 1, True), (1, 2, False), (1, 20, False), (2, 20, True), (2, 100, False), (3, 100, True)],
)
def test_the_rule_by_hand(wrong, samples, verdict):
    assert too_many(wrong, samples) is verdict
