"""Optimizers: who is updated by what, the size of a step, one division and one clipping."""

from __future__ import annotations

import pytest
import torch
from rows import tiny_drafter

from dflash_cache.common.errors import RunFailed
from dflash_cache.train.config import OptimConfig
from dflash_cache.train.drafter import Drafter
from dflash_cache.train.optim import apply_gradients, build_optimizer, group_of, optimizer_tensors, restore_optimizer

LAYER_MATRICES = 2 * 7


def give_gradients(drafter: Drafter, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def stepped(config: OptimConfig, lr: float = 0.01, weight: float = 1.0, clip_norm: float = 1e9) -> tuple[Drafter, object, float | None]:
    drafter = tiny_drafter()
    optimizer = build_optimizer(drafter, config)
    give_gradients(drafter)
    norm = apply_gradients(drafter.parameters(), optimizer, weight, lr, clip_norm, True)
    return drafter, optimizer, norm


def changes(config: OptimConfig, lr: float = 0.01) -> dict[str, torch.Tensor]:
    before = tiny_drafter().state_dict()
    after = stepped(config, lr)[0].state_dict()
    return {name: after[name] - before[name] for name in after}


def test_groups_are_matrices_of_the_layers_other_matrices_and_norms():
    groups = [group_of(name, parameter) for name, parameter in tiny_drafter().named_parameters()]
    assert {name: groups.count(name) for name in set(groups)} == {"layers": LAYER_MATRICES, "inputs": 1, "norms": 2 * 4 + 2}


def test_muon_updates_the_matrices_of_the_layers_and_adamw_all_others():
    ours, adamw = changes(OptimConfig(name="muon")), changes(OptimConfig())
    for name, parameter in tiny_drafter().named_parameters():
        same = torch.equal(ours[name], adamw[name])
        assert same == (group_of(name, parameter) != "layers"), name


def test_a_step_of_muon_is_orthogonal_and_as_large_as_one_of_adamw():
    """0.2 sqrt(max(rows, columns)) times a matrix whose singular values are about 1: root mean square 0.2 of the rate."""
    for name, change in changes(OptimConfig(name="muon")).items():
        if name.startswith("layers.") and change.dim() == 2:
            values = torch.linalg.svdvals(change / (0.01 * 0.2 * max(change.shape) ** 0.5))
            assert 0.6 < float(values.median()) <= float(values.max()) < 1.4, name  # five iterations leave the smallest behind


def test_moments_of_muon_come_back_and_the_next_step_is_bit_identical():
    config = OptimConfig(name="muon", weight_decay=0.1)
    drafter, optimizer, _ = stepped(config)
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(drafter, optimizer).items()}
    assert sum(name.startswith("momentum_buffer.") for name in tensors) == LAYER_MATRICES
    assert sum(name.startswith("exp_avg.") for name in tensors) == 25 - LAYER_MATRICES
    twin = tiny_drafter()
    twin.load_state_dict(drafter.state_dict())
    other = build_optimizer(twin, config)
    restore_optimizer(twin, other, tensors, "x")
    for of, by in ((drafter, optimizer), (twin, other)):
        give_gradients(of, 1)
        apply_gradients(of.parameters(), by, 1.0, 0.01, 1.0, True)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), twin.parameters()))


def test_moments_of_another_optimizer_are_refused():
    drafter, optimizer, _ = stepped(OptimConfig())
    with pytest.raises(RunFailed, match="does not fit"):
        restore_optimizer(drafter, build_optimizer(drafter, OptimConfig(name="muon")), optimizer_tensors(drafter, optimizer), "x")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_shrinks_matrices_and_never_norms(name: str):
    drafter = tiny_drafter()
    before = {key: parameter.detach().clone() for key, parameter in drafter.named_parameters()}
    optimizer = build_optimizer(drafter, OptimConfig(name=name, weight_decay=0.5))
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply_gradients(drafter.parameters(), optimizer, 1.0, 0.1, 1.0, True)
    for key, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[key] * (0.95 if parameter.dim() > 1 else 1.0))


def test_a_group_may_have_a_factor_of_its_own():
    plain, scaled = changes(OptimConfig()), changes(OptimConfig(lr_factors={"inputs": 0.5, "norms": 0.0}))
    torch.testing.assert_close(scaled["fc.weight"], plain["fc.weight"] / 2, rtol=1e-3, atol=1e-7)
    assert not scaled["norm.weight"].any()
    assert torch.equal(scaled["layers.0.mlp.up_proj.weight"], plain["layers.0.mlp.up_proj.weight"])


def test_gradients_are_divided_once_and_the_whole_of_them_is_clipped():
    """What AdamW then sees is a tenth of its first moment's size: (1 - 0.9) * gradient."""
    drafter = tiny_drafter()
    give_gradients(drafter)
    whole = torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()])
    drafter, optimizer, norm = stepped(OptimConfig(), weight=7.0, clip_norm=0.5)
    assert norm == pytest.approx(float(whole.norm()) / 7, rel=1e-6)
    moments = torch.cat([tensor.flatten() for name, tensor in optimizer_tensors(drafter, optimizer).items() if name.startswith("exp_avg.")])
    assert float(moments.norm()) == pytest.approx(0.1 * 0.5, rel=1e-4)


@pytest.mark.parametrize(("weight", "finite", "broken"), [(0.0, True, False), (1.0, False, False), (1.0, True, True)])
def test_an_update_of_nothing_or_of_what_is_not_finite_is_none(weight: float, finite: bool, broken: bool):
    drafter = tiny_drafter()
    optimizer = build_optimizer(drafter, OptimConfig())
    before = [parameter.detach().clone() for parameter in drafter.parameters()]
    give_gradients(drafter)
    if broken:
        drafter.fc.weight.grad[0, 0] = float("nan")
    assert apply_gradients(drafter.parameters(), optimizer, weight, 0.1, 1.0, finite) is None
    assert all(torch.equal(a, b) for a, b in zip(before, drafter.parameters()))
    assert all(not tensor.any() for state in optimizer.state.values() for tensor in state.values())  # and no step was counted
    assert all(parameter.grad is None for parameter in drafter.parameters())
