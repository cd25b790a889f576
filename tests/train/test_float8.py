"""Products in 8 bits: what is rounded and by how much, and that everything else of training stays as it is."""

from __future__ import annotations

import pytest
import torch
from rows import CPU32, Document, TinyHead, make_batch, tiny_drafter, tiny_spec

from dflash_cache.common.errors import InputError
from dflash_cache.train.config import LossConfig, TrainConfig
from dflash_cache.train.device import Compute, check_float8
from dflash_cache.train.float8 import GRADIENTS, VALUES, linear8, multiply, scaled, transposed
from dflash_cache.train.loss import Head, chunked_loss, slot_terms
from dflash_cache.train.step import StepSeeds, row_loss


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_largest_magnitude_becomes_the_largest_number_of_the_format():
    found = scaled(torch.tensor([[1.0, -2.0], [0.5, 0.0]]), VALUES)
    assert found.numbers.float().tolist() == [[224.0, -448.0], [112.0, 0.0]]
    assert float(found.scale) == pytest.approx(2 / 448)


def test_zeros_stay_zeros():
    found = scaled(torch.zeros(2, 2), GRADIENTS)
    assert not (found.numbers.float() * found.scale).any()


def test_powers_of_two_are_multiplied_exactly():
    """Scales are then powers of two times 1/448, and nothing is rounded but the scale itself."""
    a, b = torch.tensor([[1.0, 0.5], [2.0, 0.25]]), torch.tensor([[1.0, 4.0], [0.5, 0.125]])
    torch.testing.assert_close(multiply(scaled(a, VALUES), scaled(b, VALUES), torch.float32), a @ b.T, rtol=1e-6, atol=0)
    again = transposed(scaled(a, VALUES))
    assert again.numbers.float().tolist() == scaled(a, VALUES).numbers.float().T.tolist()
    assert again.numbers.is_contiguous()


def test_products_and_both_gradients_are_those_of_wide_numbers_to_a_few_percent():
    x, weight = noise(32, 48).requires_grad_(), noise(16, 48, seed=1).requires_grad_()
    grad = noise(32, 16, seed=2)
    product = linear8(x, weight)
    wide_x, wide_weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    expected = wide_x @ wide_weight.T
    product.backward(grad)
    expected.backward(grad)
    for found, right, most in ((product, expected, 0.05), (x.grad, wide_x.grad, 0.1), (weight.grad, wide_weight.grad, 0.1)):
        error = float(((found - right).norm() / right.norm()).detach())
        assert 0 < error < most
    assert weight.grad.dtype == torch.float32


def test_a_drafter_in_8_bits_keeps_its_names_and_weights_and_computes_nearly_the_same_loss():
    wide, narrow, batch = tiny_drafter(), tiny_drafter(), make_batch([Document(12), Document(10, seed=3)], 24)
    narrow.multiply_in_float8()
    assert narrow.state_dict().keys() == wide.state_dict().keys()
    sums = []
    for drafter in (wide, narrow):
        seeds = StepSeeds.at(0, 0, 0, 0, CPU32.device)
        row = row_loss(drafter, drafter.spec, TinyHead(), batch, LossConfig(anchors_per_row=4), CPU32, seeds)
        row.loss.backward()
        sums.append(row.sums.mean)
        assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in drafter.parameters())
    assert sums[0] != sums[1]
    assert sums[1] == pytest.approx(sums[0], rel=0.15)  # sums of eight products average out little


def test_the_heads_gradient_in_8_bits_leaves_the_loss_as_it_is():
    weight, labels = noise(32, 16), torch.arange(5)
    head = Head(weight)
    eight = head.with_float8_gradients()
    found = []
    for of in (head, eight):
        hidden = noise(5, 16, seed=4).requires_grad_()
        losses = chunked_loss(hidden, of, lambda _: torch.ones(5), chunk_slots=2, factors={"ce": 0.5, "tv": 2.0}, label_M=labels)
        losses.loss.backward()
        found.append((float(losses.loss.detach()), hidden.grad))
    assert found[0][0] == found[1][0]
    error = float((found[0][1] - found[1][1]).norm() / found[0][1].norm())
    assert 0 < error < 0.1


def test_a_vocabulary_that_is_no_multiple_of_16_keeps_wide_gradients():
    assert Head(noise(33, 16)).with_float8_gradients().float8_HV is None


def test_what_cannot_be_multiplied_in_8_bits_is_said_at_once():
    spec = tiny_spec()
    with pytest.raises(InputError, match=r"found: +hidden_size 8"):
        check_float8(spec, 64, CPU32)
    with pytest.raises(InputError, match="flex attention"):
        check_float8(spec, 64, Compute(torch.device("cuda"), torch.bfloat16, "dense"))


def test_compiling_without_flex_attention_is_refused_and_never_the_default():
    assert CPU32.compiles(TrainConfig().run.compile) is False
    with pytest.raises(InputError, match=r"run\.compile=true"):
        CPU32.compiles(True)


@pytest.mark.parametrize("factors", [{"ce": 1.0}, {"ce": 0.5, "tv": 2.0}])
def test_compiled_terms_are_the_plain_ones(factors: dict[str, float]):
    """What a GPU runs is another way of writing the gradient; the compiler's front end shows that it says the same."""
    head, product, labels = Head(noise(32, 16), 0.5, 3.0), noise(5, 32, seed=5), torch.arange(5)
    plain = slot_terms(head, factors, 3.0, product.clone(), None, labels)
    compiled = torch.compile(slot_terms, backend="aot_eager")(head, factors, 3.0, product.clone(), None, labels)
    for found, expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
