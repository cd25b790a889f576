"""The loss: a value computed by hand, and the chunked form against the plain one."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_cache.train.loss import Head, LossSums, chunked_loss, plain_loss, slot_weights
from dflash_cache.train.metrics import BlockCounts


def problem(slots: int = 11, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(slots, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(32, 8, generator=generator).to(dtype)
    labels = torch.randint(0, 32, (slots,), generator=generator)
    teacher = torch.randn(slots, 32, generator=generator).to(dtype)
    return hidden, weight, labels, teacher, torch.rand(slots, generator=generator).to(dtype)


def test_slot_weights_by_hand():
    torch.testing.assert_close(slot_weights(4, "exp", 2.0), torch.tensor([1.0, 0.6065, 0.3679]), atol=1e-4, rtol=0)
    assert float(slot_weights(16, "exp", 7.0)[14]) == pytest.approx(0.1353, abs=1e-4)
    assert slot_weights(4, "none", 2.0).tolist() == [1.0, 1.0, 1.0]


def test_equal_losses_give_the_same_mean_for_any_gamma():
    """All logits equal: the cross-entropy of each slot is log 32, whatever it weighs."""
    for gamma in (0.5, 4.0, 7.0):
        weights = slot_weights(4, "exp", gamma)
        loss = plain_loss(torch.zeros(3, 32), weights, torch.tensor([1, 2, 3]))
        assert float(loss / weights.sum()) == pytest.approx(math.log(32), rel=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 7, 11, 100])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_chunked_loss_equals_plain_loss_in_value_and_gradient(kind: str, chunk: int, softcap: float | None):
    hidden, weight, labels, teacher, slot = problem()
    head = Head(weight, scale=0.5, softcap=softcap)
    twin = hidden.detach().clone().requires_grad_()
    given = {"label_M": labels} if kind == "hard" else {"teacher": lambda part: teacher[part]}
    loss, predicted, targets = chunked_loss(hidden, head, slot, chunk_slots=chunk, **given)
    expected = plain_loss(head.logits(twin), slot, labels if kind == "hard" else None, teacher if kind == "soft" else None)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    (loss * 3).backward()
    (expected * 3).backward()
    torch.testing.assert_close(hidden.grad, twin.grad, atol=1e-6, rtol=1e-5)
    assert torch.equal(predicted, head.logits(twin).argmax(-1))
    assert torch.equal(targets, labels if kind == "hard" else teacher.argmax(-1))


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_gradients_pass_gradcheck_in_float64(kind: str):
    hidden, weight, labels, teacher, slot = problem(5, torch.float64)
    head = Head(weight, scale=0.7, softcap=3.0)
    given = {"label_M": labels} if kind == "hard" else {"teacher": lambda part: teacher[part]}
    assert torch.autograd.gradcheck(lambda x: chunked_loss(x, head, slot, chunk_slots=2, **given)[0], (hidden,))


def test_the_whole_logits_never_exist():
    """With 1,000 slots in chunks of 10, the largest tensor that autograd or the loop makes has 10 rows of V."""
    hidden, weight, _, _, _ = problem(1000)
    seen: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    with Watch():
        chunked_loss(hidden, Head(weight), torch.ones(1000), chunk_slots=10, label_M=torch.zeros(1000, dtype=torch.int64))[0].backward()
    assert max(seen) <= max(1000 * 8, 10 * 32)


def test_no_slots_give_a_zero_loss():
    hidden, weight, _, _, _ = problem(3)
    loss, predicted, _ = chunked_loss(hidden[:0], Head(weight), torch.ones(0), chunk_slots=4, label_M=torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert (float(loss), len(predicted)) == (0.0, 0)


def test_bfloat16_gradients_are_rounded_once_and_close():
    hidden, weight, labels, _, slot = problem()
    loss, _, _ = chunked_loss(hidden, Head(weight), slot, chunk_slots=4, label_M=labels)
    loss.backward()
    half = hidden.detach().bfloat16().requires_grad_()
    loss16, _, _ = chunked_loss(half, Head(weight.bfloat16()), slot, chunk_slots=4, label_M=labels)
    loss16.backward()
    assert float(loss16) == pytest.approx(float(loss), rel=0.02)
    torch.testing.assert_close(half.grad.float(), hidden.grad, atol=0.03, rtol=0.05)


def test_sums_add_and_divide_once():
    one = LossSums(torch.tensor(6.0), torch.tensor(2.0), BlockCounts.none(4))
    two = LossSums(torch.tensor(2.0), torch.tensor(6.0), BlockCounts.none(4))
    assert (one + two).mean == 1.0  # not the mean of 3 and 1/3
    assert LossSums.none(4).mean == 0.0
