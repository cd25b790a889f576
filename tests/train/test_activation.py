"""Activation checkpointing changes memory and nothing else."""

from __future__ import annotations

from pathlib import Path

import torch
from ranks import settings, train, write
from rows import CPU32, Document, TinyHead, make_batch, tiny_drafter

from dflash_cache.train import checkpoint
from dflash_cache.train.activation import recompute_in_backward
from dflash_cache.train.config import LossConfig
from dflash_cache.train.step import StepSeeds, row_loss


def saved_numbers(recompute: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """(numbers kept for the backward pass, gradients)."""
    drafter, kept = tiny_drafter(num_layers=4, layer_types=("full_attention",) * 4), 0
    names = list(drafter.state_dict())
    if recompute:
        recompute_in_backward(drafter.layers)
    assert list(drafter.state_dict()) == names

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    batch = make_batch([Document(60, seed=1), Document(31, seed=2)], 96)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        row = row_loss(drafter, drafter.spec, TinyHead(), batch, LossConfig(), CPU32, StepSeeds.at(0, 0, 0, 0, CPU32.device))
    row.loss.backward()
    return kept, {name: parameter.grad for name, parameter in drafter.named_parameters()}


def test_gradients_are_the_same_bits_and_less_is_kept_for_them():
    plain_kept, plain = saved_numbers(False)
    kept, found = saved_numbers(True)
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert kept < plain_kept / 3


def test_a_whole_run_gives_the_same_bits(tmp_path: Path):
    cache = write(tmp_path / "cache", [40, 61, 12, 33])
    train(settings(), [cache], tmp_path / "plain")
    train(settings(run={"activation_checkpointing": True}), [cache], tmp_path / "with")
    ends = [checkpoint.newest(tmp_path / name) / checkpoint.MODEL for name in ("plain", "with")]
    assert ends[0].read_bytes() == ends[1].read_bytes()
