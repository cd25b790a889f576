"""The loss: weighted cross-entropy, or KL to the teacher's distribution, of the slots that carry it; sums that add up.

In: the drafter's output for M such slots, the target's head, labels and weights. Out: the weighted sum of losses and the
predicted tokens. The chunked form makes each chunk's gradient in the forward pass, so that only a chunk's logits ever exist;
`plain_loss` is its slow twin. Nothing is divided here: the sum of weights is, once, by who takes the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .metrics import BlockCounts


@dataclass(frozen=True)
class LossSums:
    """What a row adds to a step. Add with +."""

    loss_sum: torch.Tensor
    """float64: sum of weight * loss."""
    weight_sum: torch.Tensor
    """float64: sum of weights."""
    counts: BlockCounts
    """Right slots and streaks."""

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(self.loss_sum + other.loss_sum, self.weight_sum + other.weight_sum, self.counts + other.counts)

    @classmethod
    def none(cls, block_size: int, device: torch.device | None = None) -> LossSums:
        """Sums of nothing."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(zero, zero, BlockCounts.none(block_size, device))

    @property
    def mean(self) -> float:
        """The loss: weighted mean over all slots; 0 when there were none."""
        weight = float(self.weight_sum)
        return float(self.loss_sum) / weight if weight else 0.0


@dataclass(frozen=True)
class Head:
    """The target's output head as a function of a normed state: logits = softcap(scale * x W^T). Frozen."""

    weight_VH: torch.Tensor
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """[M, V], in the type of `hidden_MH` or, from 16 bits, in float32."""
        product = hidden_MH @ self.weight_VH.T
        logits_MV = product.float() if product.dtype in (torch.bfloat16, torch.float16) else product
        if self.scale != 1.0:
            logits_MV = logits_MV * self.scale
        return torch.tanh(logits_MV / self.softcap) * self.softcap if self.softcap else logits_MV

    def backward(self, grad_MV: torch.Tensor, logits_MV: torch.Tensor) -> torch.Tensor:
        """Gradient of the hidden states from the gradient of the logits."""
        if self.softcap:
            grad_MV = grad_MV * (1 - (logits_MV / self.softcap) ** 2)
        return (grad_MV.to(self.weight_VH.dtype) @ self.weight_VH) * self.scale


def slot_weights(block_size: int, kind: str, gamma: float) -> torch.Tensor:
    """float32 [B-1]: exp(-(k-1)/gamma) for slot k = 1..B-1 ("exp"), or ones ("none")."""
    distance = torch.arange(block_size - 1, dtype=torch.float64)
    return torch.exp(-distance / gamma).float() if kind == "exp" else torch.ones(block_size - 1)


def plain_loss(
    logits_MV: torch.Tensor, weight_M: torch.Tensor, label_M: torch.Tensor | None = None, teacher_MV: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum over slots of weight * cross-entropy with `label_M`, or weight * KL(teacher || drafter) with teacher logits."""
    if label_M is not None:
        return (F.cross_entropy(logits_MV, label_M, reduction="none") * weight_M).sum()
    assert teacher_MV is not None
    log_teacher_MV = torch.log_softmax(teacher_MV, -1)
    return ((log_teacher_MV.exp() * (log_teacher_MV - torch.log_softmax(logits_MV, -1))).sum(-1) * weight_M).sum()


TeacherLogits = Callable[[slice], torch.Tensor]
"""Teacher logits [m, V] of a slice of the M slots."""


def chunked_loss(
    hidden_MH: torch.Tensor,
    head: Head,
    weight_M: torch.Tensor,
    *,
    chunk_slots: int,
    label_M: torch.Tensor | None = None,
    teacher: TeacherLogits | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss sum, predicted tokens int64 [M], label tokens int64 [M]); the loss is differentiable in `hidden_MH` only.

    Give `label_M` for cross-entropy or `teacher` for KL; with a teacher the label tokens are its most likely ones.
    """
    assert (label_M is None) != (teacher is None)
    loss, predicted_M, labels_M = _ChunkedLoss.apply(hidden_MH, head, weight_M, chunk_slots, label_M, teacher)
    return loss, predicted_M, labels_M


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: torch.Tensor,
        head: Head,
        weight_M: torch.Tensor,
        chunk_slots: int,
        label_M: torch.Tensor | None,
        teacher: TeacherLogits | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wants_gradient = ctx.needs_input_grad[0]
        grad_MH = torch.empty_like(hidden_MH) if wants_gradient else None
        predicted, labels = [], []
        total = torch.zeros((), dtype=torch.float64, device=hidden_MH.device)
        for start in range(0, len(hidden_MH), chunk_slots):
            part = slice(start, min(start + chunk_slots, len(hidden_MH)))
            weight_m = weight_M[part]
            logits_mV = head.logits(hidden_MH[part])
            log_p_mV = torch.log_softmax(logits_mV, -1)
            predicted.append(logits_mV.max(-1).indices)
            if label_M is not None:
                label_m = label_M[part]
                loss_m = -log_p_mV.gather(1, label_m[:, None]).squeeze(1)
                grad_mV = log_p_mV.exp_()
                grad_mV.scatter_add_(1, label_m[:, None], torch.full_like(label_m[:, None], -1, dtype=grad_mV.dtype))
            else:
                assert teacher is not None
                log_q_mV = torch.log_softmax(teacher(part).to(log_p_mV.dtype), -1)
                label_m = log_q_mV.max(-1).indices
                q_mV = log_q_mV.exp()
                loss_m = (q_mV * (log_q_mV - log_p_mV)).sum(-1)
                grad_mV = log_p_mV.exp_().sub_(q_mV)
            labels.append(label_m)
            total += (loss_m * weight_m).sum(dtype=torch.float64)
            if grad_MH is not None:
                grad_MH[part] = head.backward(grad_mV, logits_mV) * weight_m[:, None]  # in float32 at least, then rounded once
        ctx.save_for_backward(*([grad_MH] if grad_MH is not None else []))
        none = torch.empty(0, dtype=torch.int64, device=hidden_MH.device)
        predicted_M, labels_M = torch.cat([none, *predicted]), torch.cat([none, *labels])
        ctx.mark_non_differentiable(predicted_M, labels_M)
        return total, predicted_M, labels_M

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        (grad_MH,) = ctx.saved_tensors
        return grad_MH * grad.to(grad_MH.dtype), None, None, None, None, None
