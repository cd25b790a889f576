"""Replays walk as evaluation does, gaps are told from noise, and tensors' histories are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rows import tiny_drafter
from tiny_run import config

from dflash_cache.train.config import EvalConfig
from dflash_cache.train.evaluate import evaluate
from dflash_cache.train.export import export
from dflash_cache.train.gap import Counts, gap, tau, tau_interval
from dflash_cache.train.patient import Patient
from dflash_cache.train.replay import leading
from dflash_cache.train.run import run
from dflash_cache.train.tensor_story import tell


def test_both_replays_count_what_evaluation_counts(write_cache, tmp_path: Path):
    """Documents with several turns' worth of anchors, one without any, and a known token behind the last row."""
    cache, _, _ = write_cache(name="train")
    run(config(optim={"steps": 3}), [cache], tmp_path / "run")
    held_out, _, _ = write_cache(name="held-out", lengths=[12, 30, 1, 21], seed=9, next_token=7)
    export(tmp_path / "run", tmp_path / "drafter", dtype="float32", cache=cache)
    patient = Patient(held_out, tmp_path / "drafter", tmp_path / "run", 99, "cpu")
    expected = evaluate(tmp_path / "run", [held_out], EvalConfig(device="cpu", dtype="float32")).walk
    for walks in (patient.trainer_walks(patient.documents), patient.plain_walks(patient.documents, patient.plain)):
        assert (sum(of.steps for of in walks), sum(of.accepted for of in walks)) == (expected.steps, expected.accepted)


@pytest.mark.parametrize(("drafted", "expected", "right"), [([1, 2, 3], [1, 2, 3], 3), ([1, 9, 3], [1, 2, 3], 1), ([1, 2, 3], [1], 1), ([1], [], 0)])
def test_leading_tokens_end_at_the_first_wrong_one_or_with_the_text(drafted: list[int], expected: list[int], right: int):
    assert leading(drafted, expected) == right


def test_tau_counts_the_bonus_token():
    assert tau([Counts(4, 6), Counts(6, 4)]) == 2.0
    assert tau([]) == 1.0


def test_the_same_walks_never_part():
    walks = [Counts(10, accepted) for accepted in (3, 14, 25, 9, 17, 30)]
    found = gap(walks, walks)
    assert (found.difference, found.low, found.high, found.parts) == (0.0, 0.0, 0.0, False)


def test_a_small_difference_that_every_document_has_is_no_noise_but_is_too_small_to_matter():
    walks, fewer = [Counts(100, 100)] * 8, [Counts(100, 98)] * 8
    assert gap(walks, fewer).low > 0
    assert not gap(walks, fewer).parts
    assert gap(walks, [Counts(100, 90)] * 8).parts


def test_a_difference_that_one_document_makes_is_noise():
    walks = [Counts(10, 10)] * 8
    assert not gap(walks, [Counts(10, 0), *walks[1:]]).parts
    assert gap(walks, [Counts(10, 5)] * 8).parts


def test_few_documents_must_differ_clearly():
    assert not gap([Counts(100, 100)] * 3, [Counts(100, 90)] * 3).parts
    assert gap([Counts(100, 100)] * 3, [Counts(100, 50)] * 3).parts


def test_an_interval_holds_the_length():
    walks = [Counts(10, accepted) for accepted in (3, 14, 25, 9, 17, 30)]
    low, high = tau_interval(walks)
    assert low < tau(walks) < high


def tensors() -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in tiny_drafter().state_dict().items()}


BF16 = dict.fromkeys(tensors(), "bfloat16")


@pytest.mark.parametrize(
    ("change", "story"),
    [
        ({}, ""),
        ({"norm.weight": lambda t: t["hidden_norm.weight"]}, "norm.weight is the run's hidden_norm.weight"),
        ({"norm.weight": lambda t: t["norm.weight"] * float("nan")}, "norm.weight is not finite"),
        ({"norm.weight": lambda t: t["norm.weight"] + 1}, "norm.weight differs"),
        (
            {"fc.weight": lambda t: torch.cat([t["fc.weight"].chunk(3, 1)[i] for i in (1, 2, 0)], 1)},
            "fc.weight has the columns of its layers in the order 1, 2, 0",
        ),
        ({"fc.weight": lambda t: t["fc.weight"] * (torch.arange(24) >= 8)}, "fc.weight has zeros in the columns of layer number 0 (of 3, from 0)"),
    ],
    ids=["rounded alone", "another's", "not finite", "changed", "order", "zeros"],
)
def test_what_happened_to_a_tensor_is_told(change: dict, story: str):
    ours = tensors()
    rounded = {name: tensor.bfloat16().float() for name, tensor in ours.items()}
    found = tell(ours, {**rounded, **{name: make(rounded) for name, make in change.items()}}, BF16, 3)
    assert found.text == story
    assert found.differing == tuple(change)


def test_a_rounding_other_than_the_folders_type_is_a_difference():
    """float8 values in a bfloat16 folder: another precision was served than the one exported."""
    ours = tensors()
    coarse = {name: tensor.to(torch.float8_e4m3fn).float() for name, tensor in ours.items()}
    assert "differ, so the folder holds other weights" in tell(ours, coarse, BF16, 3).text
