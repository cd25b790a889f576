"""Teacher fidelity as samples arrive: does the stored verifier state predict the token that the engine itself predicted?

Counts agreements and stops the run when too many disagree. The prediction itself, argmax(lm_head(final_norm(h))), is
handed in: it belongs to training, which this folder may not import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..common.agreement import too_many
from ..common.errors import RunFailed
from .engine import Outcome

FidelityCheck = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(verifier bits uint16 [S, H], engine_top1 int32 [S]) -> bool [S]: True where they agree, near ties included."""
MakeCheck = Callable[[Path], FidelityCheck]
"""Builds the check from a cache whose `target/` is written."""


FIRST_SAMPLES = 3
"""When all of the first so many are wrong, the run stops at once: a wrong layer or norm is wrong from the first document on."""
HOPELESS_SAMPLES = 8
"""From so many samples on, more than half of them wrong stops the run at once."""


class FidelityMonitor:
    """Counts how many stored samples agree."""

    def __init__(self, check: FidelityCheck | None, max_disagreement: float, min_samples: int) -> None:
        """check None: nothing is counted. max_disagreement: share of the samples. min_samples: before judging."""
        self._check, self._max, self._min = check, max_disagreement, min_samples
        self.samples = self.agreed = 0

    @property
    def agreement(self) -> float | None:
        """Share of the samples that agree; None when none was checked."""
        return self.agreed / self.samples if self.samples else None

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Check the stored ones of `outcomes`. Raises RunFailed when too many disagree."""
        stored = [(outcome.verifier_bits_H, outcome.engine_top1) for outcome in outcomes if outcome.verifier_bits_H is not None]
        if self._check is None or not stored:
            return
        bits_SH = np.stack([bits_H for bits_H, _ in stored])
        top1_S = np.array([top1 for _, top1 in stored], np.int32)
        self.samples += len(stored)
        self.agreed += int(np.count_nonzero(self._check(bits_SH, top1_S)))
        wrong = self.samples - self.agreed
        hopeless = (wrong == self.samples >= FIRST_SAMPLES) or (self.samples >= HOPELESS_SAMPLES and 2 * wrong > self.samples)
        if hopeless or (self.samples >= self._min and wrong > self._max * self.samples):
            self._fail()

    def finish(self) -> None:
        """Judge at the end, however few samples there were. Raises RunFailed as `add` does."""
        if too_many(self.samples - self.agreed, self.samples, self._max):
            self._fail()

    def _fail(self) -> None:
        wrong = self.samples - self.agreed
        raise RunFailed(
            f"the stored verifier states are not what this engine predicts from: {wrong} of {self.samples} samples disagree",
            place="teacher fidelity",
            found=f"{wrong / self.samples:.1%}",
            expected=f"at most {self._max:.1%}",
            fix="the verifier layer, the final norm or the head is not the target's. The pending part was dropped; parts that this run "
            "had published hold the same fault, so extract into a new folder",
        )
