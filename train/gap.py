"""Is one acceptance length really below another, or is it noise? Paired over documents, because both walked the same ones.

In: steps and accepted tokens of each document, of both. Out: the difference and its interval, from resampling whole documents. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES, SEED, LEVEL = 2000, 0, 0.95
SMALLEST = 0.02
"""Share of the larger length: smaller differences explain no complaint, even certain ones (types of the products, near ties)."""
FEW = 5
"""With fewer documents an interval means little."""
CLEAR = 0.1
"""Share that a difference must then reach to count."""


@dataclass(frozen=True)
class Counts:
    """A document's walk in one of the ways."""

    steps: int
    accepted: int


@dataclass(frozen=True)
class Gap:
    """One acceptance length minus another."""

    difference: float
    low: float
    high: float
    """95 % of the resamples lie between them."""
    parts: bool
    """It is beyond noise, and large enough to matter."""

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.difference:+.3f} (95 % interval {self.low:+.3f} .. {self.high:+.3f})"


def tau(counts: Sequence[Counts]) -> float:
    """1 + accepted / steps; 1 when nothing was drafted."""
    steps = sum(of.steps for of in counts)
    return 1 + sum(of.accepted for of in counts) / steps if steps else 1.0


def tau_interval(counts: Sequence[Counts]) -> tuple[float, float]:
    """95 % of the lengths that other such documents would give."""
    low, high = np.quantile(_taus(counts, _draws(len(counts))), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def gap(one: Sequence[Counts], other: Sequence[Counts]) -> Gap:
    """tau of `one` minus tau of `other`, document by document the same."""
    assert len(one) == len(other) > 0
    draws = _draws(len(one))
    differences = _taus(one, draws) - _taus(other, draws)
    low, high = (float(edge) for edge in np.quantile(differences, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    difference, largest = tau(one) - tau(other), max(tau(one), tau(other))
    least = (SMALLEST if len(one) >= FEW else CLEAR) * largest
    return Gap(difference, low, high, parts=(low > 0 or high < 0) and abs(difference) > least)


def _draws(documents: int) -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, documents, (RESAMPLES, documents))


def _taus(counts: Sequence[Counts], draws: np.ndarray) -> np.ndarray:
    steps, accepted = (np.array([getattr(of, name) for of in counts])[draws].sum(1) for name in ("steps", "accepted"))
    return 1 + accepted / np.maximum(steps, 1)
