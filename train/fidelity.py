"""TeacherCheck: does the stored verifier state predict the token that the engine predicted?

In: a cache's target files; then verifier states (as stored bits) and the engine's own most likely tokens. Out: agreement per
sample. It runs the same head and norm as training does, so agreement proves capture, storage, norm and head at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..common import spec
from .device import resolve_compute
from .target_head import TargetHead

NEAR_TIE = 2.0**-6
"""Share of the largest logit (at least 1) within which two tokens are a tie. The engine rounds its logits to bfloat16 (2^-8
of their size), and its kernels round the state before it differently from ours: two such steps each, and a little."""


@dataclass(frozen=True)
class Agreement:
    """How samples compare. Add with +."""

    exact: int = 0
    """The same token."""
    near_ties: int = 0
    """Another token whose logit is as good as equal."""
    different: int = 0
    """Another token."""

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.exact + other.exact, self.near_ties + other.near_ties, self.different + other.different)

    @property
    def total(self) -> int:
        """Samples."""
        return self.exact + self.near_ties + self.different

    @property
    def rate(self) -> float:
        """Share that agrees, near ties included; 1 when there is nothing to compare."""
        return (self.exact + self.near_ties) / self.total if self.total else 1.0


class TeacherCheck:
    """Loads the head of a cache once. Call it with verifier bits uint16 [S, H] and engine_top1 int32 [S]: bool [S], agrees."""

    def __init__(self, cache: Path, device: str = "auto") -> None:
        compute = resolve_compute(device, "auto", "auto")
        self.spec = spec.load(cache)
        self._head = TargetHead(cache, self.spec, compute.device, compute.dtype)

    def __call__(self, verifier_bits: np.ndarray, engine_top1: np.ndarray) -> np.ndarray:
        exact, near = self._judge(verifier_bits, engine_top1)
        return exact | near

    def compare(self, verifier_bits: np.ndarray, engine_top1: np.ndarray) -> Agreement:
        """The same as counts."""
        exact, near = self._judge(verifier_bits, engine_top1)
        return Agreement(int(exact.sum()), int((near & ~exact).sum()), int((~exact & ~near).sum()))

    def top1(self, verifier_bits: np.ndarray) -> np.ndarray:
        """int32 [n]: the teacher's most likely token after each row of verifier bits, uint16 [n, H]."""
        return self._head.teacher_tokens(_states(verifier_bits)).cpu().numpy().astype(np.int32)

    def _judge(self, verifier_bits: np.ndarray, engine_top1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        exact, near = np.zeros(len(engine_top1), bool), np.zeros(len(engine_top1), bool)
        for start in range(0, len(engine_top1), self._head.chunk_rows):
            part = slice(start, start + self._head.chunk_rows)
            logits_nV = self._head.teacher_logits(_states(verifier_bits[part]))
            engine_n = torch.from_numpy(np.asarray(engine_top1[part], np.int64)).to(logits_nV.device)
            known_n = (engine_n >= 0) & (engine_n < logits_nV.shape[1])
            best = logits_nV.max(-1)
            theirs_n = logits_nV.gather(1, engine_n.clamp(0, logits_nV.shape[1] - 1)[:, None]).squeeze(1)
            close_n = best.values - theirs_n <= NEAR_TIE * best.values.abs().clamp(min=1.0)  # False for NaN
            exact[part] = ((best.indices == engine_n) & known_n & best.values.isfinite()).cpu().numpy()
            near[part] = (close_n & known_n).cpu().numpy()
        return exact, near


def _states(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, np.uint16).view(np.int16)).view(torch.bfloat16)
