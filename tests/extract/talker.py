"""A tiny random target that talks in letters and ends its answers, and what a chat with it must have given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tiny_target as tiny
import torch
from fake_engine import END_ID, letters
from safetensors.torch import load_file, save_file

from dflash_cache.common.sample import Sample

ROWS: list[Any] = [{"turns": [f"question {number} of turn {turn}" for turn in range(number % 3 + 1)]} for number in range(18)]
LETTERS = letters("abcdefghijklmnopqrstuvwxyz")
NEAR_TIE = 0.15
"""Logits so near to the largest one may be chosen instead of it: the engines round differently."""


def build_talker(folder: Path) -> Path:
    """Its head knows the letters and, somewhat louder, the end of a turn."""
    tiny.build_target(folder, seed=5)
    weights = load_file(folder / "model.safetensors")
    head_VH = weights["lm_head.weight"]
    silent = torch.ones(len(head_VH), dtype=torch.bool)
    silent[[*LETTERS, END_ID]] = False
    head_VH[silent] = 0
    head_VH[END_ID] *= 2.2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def render(messages: list[dict[str, str]]) -> list[int]:
    """The prompt's ids."""
    tokenizer = tiny.build_tokenizer()
    ids: list[int] = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False)[
        "input_ids"
    ]
    return ids


def check_chat(questions: list[str], sample: Sample, model: Any) -> int:
    """`sample` is the whole chat, every answer the model's greedy one and learned from; how many answers there are."""
    messages: list[dict[str, str]] = []
    ids = [*sample.input_ids.tolist(), sample.next_token]
    learned = [*sample.loss_mask.tolist(), 1]
    with torch.inference_mode():
        logits_TV = model(torch.tensor(ids)[None]).logits[0].float()
    end, mask = 0, [0] * len(ids)
    for number, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        prompt = render(messages)
        assert ids[: len(prompt)] == prompt  # what a server would see at this turn
        end = len(prompt)
        while ids[end] != END_ID and end + 1 < len(ids):
            end += 1
        for place in range(len(prompt), end + 1):  # each token is the one that the model says next
            assert logits_TV[place - 1].max() - logits_TV[place - 1, ids[place]] < NEAR_TIE
            mask[place] = 1
        assert ids[end] == END_ID or number + 1 == len(questions)
        messages.append({"role": "assistant", "content": tiny.build_tokenizer().decode(ids[len(prompt) : end])})
    assert (end, learned) == (len(ids) - 1, mask)
    return len(questions)


def check_all(samples: Mapping[int, Sample], target: Path) -> int:
    """Of samples by row; how many answers there are."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    return sum(check_chat(ROWS[row]["turns"], sample, model) for row, sample in samples.items())


def supervised(samples: Mapping[int, Sample]) -> int:
    """Tokens that are learned from."""
    return sum(int(np.sum(sample.loss_mask)) + 1 for sample in samples.values())
