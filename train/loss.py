"""The loss: the weighted sum over the slots that carry it, made in chunks; sums that add up.

In: the drafter's output for M such slots, the head, what teaches them and how slots are weighed. Out: the weighted sum of
losses and the predicted tokens. Each chunk's gradient is made in the forward pass, so that only a chunk's logits ever exist.
Nothing is divided here: the sum of weights is, once, by who takes the step. The terms themselves are in `loss_terms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .float8 import GRADIENTS, MULTIPLE, VALUES, Scaled, multiply, scaled, transposed
from .loss_terms import distribution_terms, largest_token_gradient, token_terms
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
    float8_HV: Scaled | None = None
    """The weight once more, transposed, in 8 bits: gradients then come from it. Logits never do."""

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """[M, V], in the type of `hidden_MH` or, from 16 bits, in float32."""
        return self.shape(self.product(hidden_MH))

    def product(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """x W^T [M, V], in the type of `hidden_MH`."""
        return hidden_MH @ self.weight_VH.T

    def shape(self, product_MV: torch.Tensor) -> torch.Tensor:
        """Logits of a product."""
        logits_MV = product_MV.float() if product_MV.dtype in (torch.bfloat16, torch.float16) else product_MV
        if self.scale != 1.0:
            logits_MV = logits_MV * self.scale
        return torch.tanh(logits_MV / self.softcap) * self.softcap if self.softcap else logits_MV

    def product_gradient(self, grad_MV: torch.Tensor, logits_MV: torch.Tensor, largest: float | None) -> torch.Tensor:
        """Gradient of the product / scale, in the type of the weight, from that of the logits.

        largest: what no gradient of a logit exceeds, where that is known; they then come in 8 bits if the head has them.
        """
        if self.softcap:
            grad_MV = grad_MV * (1 - (logits_MV / self.softcap) ** 2)
        if self.float8_HV is None or largest is None:
            return grad_MV.to(self.weight_VH.dtype)
        return (grad_MV * (torch.finfo(GRADIENTS).max / largest)).to(GRADIENTS)

    def backward(self, product_grad_MV: torch.Tensor, largest: float) -> torch.Tensor:
        """Gradient of the hidden states, from `product_gradient`."""
        if product_grad_MV.dtype != GRADIENTS:
            return (product_grad_MV @ self.weight_VH) * self.scale
        assert self.float8_HV is not None
        scale = torch.full((), largest / torch.finfo(GRADIENTS).max, device=product_grad_MV.device)
        return multiply(Scaled(product_grad_MV, scale), self.float8_HV, self.weight_VH.dtype) * self.scale

    def with_float8_gradients(self) -> Head:
        """The same, ready to make gradients in 8 bits; itself where the sides do not fit."""
        if any(side % MULTIPLE for side in self.weight_VH.shape):
            return self
        return replace(self, float8_HV=transposed(scaled(self.weight_VH, VALUES)))


_compiled_terms: Callable[..., Any] | None = None
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


def slot_terms(
    head: Head,
    factors: Mapping[str, float],
    eta: float,
    product_mV: torch.Tensor,
    teacher_mV: torch.Tensor | None,
    label_m: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(predicted, label, loss, confidence: [m]; gradient of the product [m, V]) of m slots; all that happens to V numbers of a slot."""
    logits_mV = head.shape(product_mV)
    predicted_m = logits_mV.max(-1).indices
    log_p_mV = torch.log_softmax(logits_mV, -1)
    log_q_mV = torch.log_softmax(teacher_mV.to(log_p_mV.dtype), -1) if teacher_mV is not None else None
    if label_m is None:
        assert log_q_mV is not None
        label_m = log_q_mV.max(-1).indices
    confidence_m = log_p_mV.gather(1, label_m[:, None]).squeeze(1).exp()
    if log_q_mV is None:
        loss_m, grad_mV = token_terms(factors, log_p_mV, label_m)
    else:
        loss_m, grad_mV = distribution_terms(factors, eta, log_p_mV, log_q_mV, label_m)
    largest = largest_token_gradient(factors) if log_q_mV is None else None
    return predicted_m, label_m, loss_m, confidence_m, head.product_gradient(grad_mV, logits_mV, largest)


def _slot_terms(head: Head, factors: Mapping[str, float], eta: float, product_mV: torch.Tensor, *rest: torch.Tensor | None) -> Any:
    """`slot_terms`; on a GPU compiled, so that V numbers are read and written a few times instead of a dozen."""
    global _compiled_terms
    if product_mV.device.type != "cuda":
        return slot_terms(head, factors, eta, product_mV, *rest)
    if _compiled_terms is None:
        _compiled_terms = torch.compile(slot_terms)
    for tensor in (product_mV, *rest):
        if tensor is not None and len(tensor) > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # the last chunk of a row is smaller: one kernel serves all sizes
    return _compiled_terms(head, factors, eta, product_mV, *rest)


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
            product_mV = head.product(hidden_MH[part])
            teacher_mV = teacher(part) if teacher is not None else None
            found = _slot_terms(head, factors, lk_eta, product_mV, teacher_mV, None if label_M is None else label_M[part])
            for values, value in zip((predicted, labels, losses, confidences), found):
                values.append(value)
            if grad_MH is not None:
                grad_MH[part] = head.backward(found[-1], largest_token_gradient(factors))
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
