"""The loss: the weighted sum over the slots that carry it, made in chunks; sums that add up.

In: the drafter's output for M such slots, the head, what teaches them and how slots are weighed. Out: the weighted sum of
losses and the predicted tokens. Each chunk's gradient is made in the forward pass, so that only a chunk's logits ever exist.
Nothing is divided here: the sum of weights is, once, by who takes the step. The terms themselves are in `loss_terms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .loss_terms import distribution_terms, token_terms
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
    def none(cls, num_slots: int, device: torch.device | None = None) -> LossSums:
        """Sums of nothing, for blocks that draft `num_slots` tokens."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(zero, zero, BlockCounts.none(num_slots, device))

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


TeacherLogits = Callable[[slice], torch.Tensor]
"""Teacher logits [m, V] of a slice of the M slots."""
Weigh = Callable[[torch.Tensor], torch.Tensor]
"""Weights [M], float32, of M slots from the drafter's probability of each label [M]."""


@dataclass(frozen=True)
class SlotLosses:
    """What M slots come to."""

    loss: torch.Tensor
    """float64: sum of weight * loss; differentiable in the hidden states only."""
    predicted_M: torch.Tensor
    """int64: the drafter's most likely token."""
    label_M: torch.Tensor
    """int64: the token that counts as right."""
    weight_M: torch.Tensor
    """What each slot weighed; a constant to autograd."""


def chunked_loss(
    hidden_MH: torch.Tensor,
    head: Head,
    weigh: Weigh,
    *,
    chunk_slots: int,
    factors: Mapping[str, float],
    lk_eta: float = 3.0,
    label_M: torch.Tensor | None = None,
    teacher: TeacherLogits | None = None,
) -> SlotLosses:
    """The terms of `factors` for M slots, `chunk_slots` of them at a time.

    Give `label_M` for a loss against tokens or `teacher` for one against distributions; with a teacher the label tokens are
    its most likely ones unless `label_M` is given too.
    """
    assert label_M is not None or teacher is not None
    return SlotLosses(*_ChunkedLoss.apply(hidden_MH, head, weigh, chunk_slots, factors, lk_eta, label_M, teacher))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: torch.Tensor,
        head: Head,
        weigh: Weigh,
        chunk_slots: int,
        factors: Mapping[str, float],
        lk_eta: float,
        label_M: torch.Tensor | None,
        teacher: TeacherLogits | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wants_gradient = ctx.needs_input_grad[0]
        grad_MH = torch.empty_like(hidden_MH) if wants_gradient else None
        none = torch.empty(0, dtype=torch.int64, device=hidden_MH.device)
        predicted, labels, losses, confidences = [none], [none], [none.float()], [none.float()]
        for start in range(0, len(hidden_MH), chunk_slots):
            part = slice(start, min(start + chunk_slots, len(hidden_MH)))
            logits_mV = head.logits(hidden_MH[part])
            predicted.append(logits_mV.max(-1).indices)
            log_p_mV = torch.log_softmax(logits_mV, -1)
            log_q_mV = torch.log_softmax(teacher(part).to(log_p_mV.dtype), -1) if teacher is not None else None
            if label_M is None:
                assert log_q_mV is not None
                label_m = log_q_mV.max(-1).indices
            else:
                label_m = label_M[part]
            labels.append(label_m)
            confidences.append(log_p_mV.gather(1, label_m[:, None]).squeeze(1).exp())
            if log_q_mV is None:
                loss_m, grad_mV = token_terms(factors, log_p_mV, label_m)
            else:
                loss_m, grad_mV = distribution_terms(factors, lk_eta, log_p_mV, log_q_mV, label_m)
            losses.append(loss_m)
            if grad_MH is not None:
                grad_MH[part] = head.backward(grad_mV, logits_mV)
        weight_M = weigh(torch.cat(confidences))
        total = torch.zeros((), dtype=torch.float64, device=hidden_MH.device)
        for weighted_m in (torch.cat(losses) * weight_M).split(chunk_slots):
            total += weighted_m.sum(dtype=torch.float64)
        if grad_MH is not None:
            grad_MH.mul_(weight_M[:, None])  # in float32 at least, then rounded
        ctx.save_for_backward(*([grad_MH] if grad_MH is not None else []))
        predicted_M, labels_M = torch.cat(predicted), torch.cat(labels)
        ctx.mark_non_differentiable(predicted_M, labels_M, weight_M)
        return total, predicted_M, labels_M, weight_M

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        (grad_MH,) = ctx.saved_tensors
        return grad_MH * grad.to(grad_MH.dtype), None, None, None, None, None, None, None
