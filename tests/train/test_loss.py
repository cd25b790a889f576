"""The loss: values computed by hand, every term against plain autograd in float64, and what is never kept in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F

from dflash_cache.train.loss import Head, LossSums, SlotLosses, chunked_loss
from dflash_cache.train.metrics import BlockCounts
from dflash_cache.train.slot_weights import dpace_weights, slot_weights

TOKEN = [{"ce": 1.0}, {"tv": 1.0}, {"ce": 0.5, "tv": 2.0}]
SOFT = [{name: 1.0} for name in ("ce", "kl", "reverse-kl", "tv", "lk", "lk-hybrid")]
SOFT += [{"ce": 1.0, "tv": 0.5}, {"kl": 2.0}, {"ce": 0.1, "kl": 0.2, "reverse-kl": 0.3, "tv": 0.4, "lk": 0.5, "lk-hybrid": 0.6}]


def problem(slots: int = 11, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(slots, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(32, 8, generator=generator).to(dtype)
    labels = torch.randint(0, 32, (slots,), generator=generator)
    teacher = 3 * torch.randn(slots, 32, generator=generator).to(dtype)
    return hidden, weight, labels, teacher, torch.rand(slots, generator=generator).to(dtype)


def plain_terms(factors: Mapping[str, float], logits: torch.Tensor, q: torch.Tensor, label: torch.Tensor, eta: float = 3.0) -> torch.Tensor:
    """[M]: the definitions, for autograd to differentiate. q: the teacher's probabilities, a point mass for a token."""
    p = torch.softmax(logits, -1)
    acceptance = torch.minimum(p, q).sum(-1)
    kl = (torch.special.xlogy(q, q) - q * p.log()).sum(-1)
    share = torch.exp(-eta * acceptance.detach())
    terms = {
        "ce": F.cross_entropy(logits, label, reduction="none"),
        "kl": kl,
        "reverse-kl": (p * (p.log() - q.log())).sum(-1),
        "tv": 0.5 * (p - q).abs().sum(-1),
        "lk": -acceptance.log(),
        "lk-hybrid": share * kl + (1 - share) * (1 - acceptance),
    }
    return torch.stack([factor * terms[name] for name, factor in factors.items()]).sum(0)


def losses(hidden: torch.Tensor, head: Head, weight: torch.Tensor, factors: Mapping[str, float], chunk: int = 4, **given) -> SlotLosses:
    return chunked_loss(hidden, head, lambda _: weight, chunk_slots=chunk, factors=factors, **given)


def test_slot_weights_by_hand():
    torch.testing.assert_close(slot_weights(3, "exp", 2.0), torch.tensor([1.0, 0.6065, 0.3679]), atol=1e-4, rtol=0)
    assert float(slot_weights(15, "exp", 7.0)[14]) == pytest.approx(0.1353, abs=1e-4)
    assert slot_weights(3, "none", 2.0).tolist() == [1.0, 1.0, 1.0]


def test_dpace_weights_by_hand():
    """Confidences 1, 0.5, 0, alpha 0.5: smoothed 1, 0.75, 0.5; products 1, 0.75, 0.375; sums from the end 2.125, 1.125, 0.375.

    A block of two slots ends its sums there; padding weighs nothing.
    """
    confidence = torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0], [1.0, 1.0, 1.0]])
    carries = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    assert dpace_weights(confidence, carries, 0.5).tolist() == [[2.125, 1.125, 0.375], [1.75, 0.75, 0.0], [0.0, 0.0, 0.0]]
    assert dpace_weights(confidence, carries, 1.0).tolist() == [[3.0, 2.0, 1.0], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_equal_losses_give_the_same_mean_for_any_gamma():
    """All logits equal: the cross-entropy of each slot is log 32, whatever it weighs."""
    for gamma in (0.5, 4.0, 7.0):
        weights = slot_weights(3, "exp", gamma)
        found = losses(torch.zeros(3, 8), Head(torch.ones(32, 8)), weights, {"ce": 1.0}, label_M=torch.tensor([1, 2, 3]))
        assert float(found.loss / weights.sum()) == pytest.approx(math.log(32), rel=1e-6)


def test_terms_by_hand():
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): they overlap by 3/4."""
    hidden, head = torch.tensor([[0.5, 0.25, 0.25]]).log(), Head(torch.eye(3))
    teacher = torch.tensor([[0.25, 0.25, 0.5]]).log()
    share = math.exp(-3 * 0.75)
    expected = {"ce": math.log(4), "kl": math.log(2) / 4, "reverse-kl": math.log(2) / 4, "tv": 0.25, "lk": -math.log(0.75)}
    expected["lk-hybrid"] = share * expected["kl"] + (1 - share) * 0.25
    for name, value in expected.items():
        found = losses(hidden, head, torch.ones(1), {name: 1.0}, teacher=lambda part: teacher[part])
        assert float(found.loss) == pytest.approx(value, rel=1e-5), name
    assert float(losses(hidden, head, torch.ones(1), {"tv": 1.0}, label_M=torch.tensor([2])).loss) == pytest.approx(0.75)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 7, 11, 100])
@pytest.mark.parametrize(("kind", "factors"), [*(("token", f) for f in TOKEN), *(("soft", f) for f in SOFT)])
def test_chunked_loss_equals_autograd_of_the_definitions(kind: str, factors: dict[str, float], chunk: int, softcap: float | None):
    hidden, weight, labels, teacher, slot = problem()
    head, twin = Head(weight, scale=0.5, softcap=softcap), hidden.detach().clone().requires_grad_()
    label, q = (labels, F.one_hot(labels, 32).double()) if kind == "token" else (teacher.argmax(-1), torch.softmax(teacher, -1))
    given = {"label_M": labels} if kind == "token" else {"teacher": lambda part: teacher[part]}
    found = losses(hidden, head, slot, factors, chunk, **given)
    expected = (plain_terms(factors, head.logits(twin), q, label) * slot).sum()
    assert float(found.loss) == pytest.approx(float(expected), rel=1e-12)
    (found.loss * 3).backward()
    (expected * 3).backward()
    torch.testing.assert_close(hidden.grad, twin.grad, atol=1e-12, rtol=1e-10)
    assert torch.equal(found.predicted_M, head.logits(twin).argmax(-1))
    assert torch.equal(found.label_M, label)


@pytest.mark.parametrize(("kind", "factors"), [("token", TOKEN[2]), ("soft", SOFT[-1])])
def test_gradients_pass_gradcheck_in_float64(kind: str, factors: dict[str, float]):
    hidden, weight, labels, teacher, slot = problem(5)
    given = {"label_M": labels} if kind == "token" else {"teacher": lambda part: teacher[part]}
    eta = 0.0 if "lk-hybrid" in factors else 3.0  # at 0 its share is 1, whatever the acceptance, which it takes as a constant
    assert torch.autograd.gradcheck(lambda x: losses(x, Head(weight, 0.7, 3.0), slot, factors, 2, lk_eta=eta, **given).loss, (hidden,))


def test_terms_stay_finite_where_drafter_and_teacher_never_agree():
    """Logits 200 apart: the overlap is below the smallest float32."""
    hidden = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 200.0, 0.0]])
    for factors in SOFT:
        found = losses(hidden, Head(torch.eye(3)), torch.ones(1), factors, teacher=lambda part: teacher[part])
        (gradient,) = torch.autograd.grad(found.loss, hidden)
        assert found.loss.isfinite(), factors
        assert gradient.isfinite().all(), factors


def test_weights_may_depend_on_the_drafters_confidence_and_are_constants():
    """The confidence handed over is the drafter's probability of each label; the gradient does not go through the weight."""
    hidden, weight, labels, _, _ = problem()
    twin = hidden.detach().clone().requires_grad_()
    head = Head(weight)
    found = chunked_loss(hidden, head, lambda confidence: confidence**2, chunk_slots=4, factors={"ce": 1.0}, label_M=labels)
    ce = F.cross_entropy(head.logits(twin), labels, reduction="none")
    expected = torch.exp(-2 * ce.detach())
    torch.testing.assert_close(found.weight_M, expected)
    found.loss.backward()
    (ce * expected).sum().backward()
    torch.testing.assert_close(hidden.grad, twin.grad)


def test_the_whole_logits_never_exist():
    """With 1,000 slots in chunks of 10, the largest tensor that autograd or the loop makes has 10 rows of V."""
    hidden, weight, _, _, _ = problem(1000)
    seen: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    rows = torch.zeros(10, 32, dtype=torch.float64)
    with Watch():
        losses(hidden, Head(weight), torch.ones(1000), {"ce": 1.0}, 10, label_M=torch.zeros(1000, dtype=torch.int64)).loss.backward()
        losses(hidden, Head(weight), torch.ones(1000), SOFT[-1], 10, teacher=lambda part: rows).loss.backward()
    assert max(seen) <= max(1000 * 8, 10 * 32)


def test_no_slots_give_a_zero_loss():
    hidden, weight, _, _, _ = problem(3)
    found = losses(hidden[:0], Head(weight), torch.ones(0), {"ce": 1.0}, label_M=torch.zeros(0, dtype=torch.int64))
    found.loss.backward()
    assert (float(found.loss), len(found.predicted_M)) == (0.0, 0)


def test_bfloat16_gradients_are_close():
    hidden, weight, labels, _, slot = problem(dtype=torch.float32)
    losses(hidden, Head(weight), slot, {"ce": 1.0}, label_M=labels).loss.backward()
    half = hidden.detach().bfloat16().requires_grad_()
    found = losses(half, Head(weight.bfloat16()), slot, {"ce": 1.0}, label_M=labels)
    found.loss.backward()
    exact = losses(hidden, Head(weight), slot, {"ce": 1.0}, label_M=labels)
    assert float(found.loss) == pytest.approx(float(exact.loss), rel=0.02)
    torch.testing.assert_close(half.grad.float(), hidden.grad, atol=0.03, rtol=0.05)


def test_sums_add_and_divide_once():
    one = LossSums(torch.tensor(6.0), torch.tensor(2.0), BlockCounts.none(3))
    two = LossSums(torch.tensor(2.0), torch.tensor(6.0), BlockCounts.none(3))
    assert (one + two).mean == 1.0  # not the mean of 3 and 1/3
    assert LossSums.none(3).mean == 0.0
