"""The terms of the loss of a slot, and their gradients in the logits, written out so that nothing of V is kept for autograd.

In: log-probabilities of m slots and what teaches them. Out: loss [m] and gradient [m, V]. p is the drafter's distribution, q
the teacher's, y the label token, acceptance = sum of min(p, q), which is the chance that sampling accepts the slot.

    ce          -log p(y)
    kl          KL(q || p)
    reverse-kl  KL(p || q)
    tv          1 - acceptance; for a single token 1 - p(y)
    lk          -log acceptance
    lk-hybrid   c * kl + (1 - c) * tv with c = exp(-eta * acceptance), taken as a constant

Source of the last three: LK losses, arXiv 2602.23881.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


def token_terms(factors: Mapping[str, float], log_p_mV: torch.Tensor, label_m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`ce` and `tv` against one token. The gradient is made in the memory of `log_p_mV`."""
    ce, tv = factors.get("ce", 0.0), factors.get("tv", 0.0)
    log_p_m = log_p_mV.gather(1, label_m[:, None]).squeeze(1)
    grad_mV = log_p_mV.exp_()
    if torch.compiler.is_compiling():  # the same, as one kernel with what is around it
        grad_mV = grad_mV - (torch.arange(grad_mV.shape[1], device=grad_mV.device) == label_m[:, None]).to(grad_mV.dtype)
    else:
        grad_mV.scatter_add_(1, label_m[:, None], torch.full_like(label_m[:, None], -1, dtype=grad_mV.dtype))
    if (ce, tv) == (1.0, 0.0):
        return -log_p_m, grad_mV
    p_m = log_p_m.exp()
    return ce * -log_p_m + tv * (1 - p_m), grad_mV.mul_((ce + tv * p_m)[:, None])  # both gradients point along p - one_hot(y)


def largest_token_gradient(factors: Mapping[str, float]) -> float:
    """What no gradient of a logit exceeds in `token_terms`: both are p - one_hot(y) times the term's factor and at most 1."""
    return factors.get("ce", 0.0) + factors.get("tv", 0.0)


def distribution_terms(
    factors: Mapping[str, float], eta: float, log_p_mV: torch.Tensor, log_q_mV: torch.Tensor, label_m: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All terms against the teacher's distribution, `ce` against `label_m`. `log_p_mV` may be overwritten."""
    if factors == {"kl": 1.0}:
        q_mV = log_q_mV.exp()
        return (q_mV * (log_q_mV - log_p_mV)).sum(-1), log_p_mV.exp_().sub_(q_mV)
    get = factors.get
    ce, kl, reverse, tv, lk, hybrid = (get(name, 0.0) for name in ("ce", "kl", "reverse-kl", "tv", "lk", "lk-hybrid"))
    zero_m = torch.zeros_like(log_p_mV[:, 0])
    loss_m, along_q_m, along_overlap_m, along_p_m = zero_m, zero_m + kl, zero_m + tv, zero_m + ce + kl
    if tv or lk or hybrid:
        log_acceptance_m = torch.minimum(log_p_mV, log_q_mV).logsumexp(-1)
        acceptance_m = log_acceptance_m.exp().clamp_min(torch.finfo(log_p_mV.dtype).tiny)
        share_m = (-eta * acceptance_m).exp() * hybrid
        along_overlap_m = along_overlap_m + lk / acceptance_m + (hybrid - share_m)
        along_q_m, along_p_m = along_q_m + share_m, along_p_m + share_m
        loss_m = loss_m + (tv + hybrid - share_m) * (1 - acceptance_m) - lk * log_acceptance_m
    p_mV, q_mV = log_p_mV.exp(), log_q_mV.exp()
    grad_mV = p_mV * along_p_m[:, None] - q_mV * along_q_m[:, None]
    if kl or hybrid:
        loss_m = loss_m + along_q_m * (q_mV * (log_q_mV - log_p_mV)).sum(-1)
    if reverse:
        ratio_mV = log_p_mV - log_q_mV
        reverse_m = (p_mV * ratio_mV).sum(-1)
        loss_m = loss_m + reverse * reverse_m
        grad_mV += reverse * p_mV * (ratio_mV - reverse_m[:, None])
    if tv or lk or hybrid:
        below_mV = p_mV * (log_p_mV < log_q_mV)  # where raising p raises the overlap
        grad_mV += along_overlap_m[:, None] * (p_mV * below_mV.sum(-1, keepdim=True) - below_mV)
    if ce:
        loss_m = loss_m - ce * log_p_mV.gather(1, label_m[:, None]).squeeze(1)
        grad_mV.scatter_add_(1, label_m[:, None], torch.full_like(label_m[:, None], -ce, dtype=grad_mV.dtype))
    return loss_m, grad_mV
