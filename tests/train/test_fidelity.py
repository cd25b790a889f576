"""TeacherCheck: agreement, near ties and differences against numbers made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_target_head import rewrite

from dflash_cache.train.fidelity import Agreement, TeacherCheck


@pytest.fixture
def check(write_cache) -> TeacherCheck:
    """Identity head of 8 tokens, norm weight 1: the logits of a state are the state over its rms."""
    cache, _, _ = write_cache(vocab=8)

    def change(tensors):
        tensors["lm_head.weight"] = torch.eye(8).bfloat16()
        tensors["norm.weight"] = torch.ones(8).bfloat16()

    rewrite(cache, change)
    return TeacherCheck(cache, device="cpu")


def bits(*states: list[float]) -> np.ndarray:
    return (np.array(states, np.float32).view(np.uint32) >> 16).astype(np.uint16)


STATE = [0.0, 1.0, 0.9921875, 0.5, 0, 0, 0, 0]  # token 2 is within 2^-6 of token 1, token 3 is not


def test_the_same_token_agrees_a_near_tie_agrees_another_does_not(check: TeacherCheck):
    states = bits(STATE, STATE, STATE)
    assert check(states, np.array([1, 2, 3], np.int32)).tolist() == [True, True, False]
    assert check.compare(states, np.array([1, 2, 3], np.int32)) == Agreement(exact=1, near_ties=1, different=1)
    assert check.top1(states).tolist() == [1, 1, 1]


def test_tokens_outside_the_vocabulary_and_broken_states_never_agree(check: TeacherCheck):
    assert check(bits(STATE, STATE), np.array([-1, 8], np.int32)).tolist() == [False, False]
    assert check(bits([float("nan")] * 8), np.array([0], np.int32)).tolist() == [False]


def test_agreements_add(check: TeacherCheck):
    total = Agreement(3, 1, 1) + Agreement(5, 0, 0)
    assert (total.total, total.rate) == (10, 0.9)
    assert Agreement().rate == 1.0


def test_the_check_uses_the_heads_own_teacher_tokens(write_cache):
    cache, _, samples = write_cache()
    check = TeacherCheck(cache, device="cpu")
    states = np.stack([sample.verifier_last_hidden_states[-1] for sample in samples])
    assert check(states, check.top1(states)).all()
