from __future__ import annotations

import numpy as np
import pytest

from dflash_cache.common.errors import RunFailed
from dflash_cache.extract.engine import Document, Outcome
from dflash_cache.extract.fidelity import FidelityMonitor


def outcome(top1: int, bits: int | None = 7) -> Outcome:
    document = Document(b"0" * 16, "d", 0, np.zeros(1, np.int32), np.zeros(1, np.uint8))
    return Outcome(document, 1, 1, top1, None if bits is None else np.full(2, bits, np.uint16), None if bits is not None else "why")


def agrees_with_first_bit(bits_SH: np.ndarray, top1_S: np.ndarray) -> np.ndarray:
    return np.asarray(bits_SH[:, 0] == top1_S)


def test_agreements_are_counted_over_stored_samples_only():
    monitor = FidelityMonitor(agrees_with_first_bit, 0.5, 50)
    monitor.add([outcome(7), outcome(8), outcome(7, None)])
    assert (monitor.samples, monitor.agreed, monitor.agreement) == (2, 1, 0.5)


def test_more_than_two_percent_stop_the_run_once_fifty_samples_are_seen():
    monitor = FidelityMonitor(agrees_with_first_bit, 0.02, 50)
    monitor.add([outcome(8), outcome(8)] + [outcome(7)] * 47)
    with pytest.raises(RunFailed, match="2 of 50 samples disagree"):
        monitor.add([outcome(7)])


def test_two_percent_do_not_stop_it():
    monitor = FidelityMonitor(agrees_with_first_bit, 0.02, 50)
    monitor.add([outcome(8)] + [outcome(7)] * 49)
    assert monitor.agreement == 0.98


def test_without_a_check_nothing_is_counted():
    monitor = FidelityMonitor(None, 0.02, 1)
    monitor.add([outcome(8)])
    assert monitor.agreement is None


def test_three_wrong_samples_at_the_start_stop_the_run_at_once():
    monitor = FidelityMonitor(agrees_with_first_bit, 0.02, 50)
    monitor.add([outcome(8), outcome(8)])
    with pytest.raises(RunFailed, match="3 of 3 samples disagree"):
        monitor.add([outcome(8)])
