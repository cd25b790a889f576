"""The ruler: a target whose states spell out which block wrote them, which token they belong to and how many tokens it saw.

An ordinary transformers class with its weights set by hand, so that both engines load it. Every block leaves the token's channels alone
and writes a number into the channel of its own; the first attending block also writes 1 / (tokens seen). Reading a state is
therefore no comparison with another run: it says by itself what it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tiny_target as tiny

LOW, HIGH, ONE, FIRST, SEEN, BIG, BLOCKS = 0, 1, 2, 3, 4, 5, 8
"""Channels: the token's id modulo 32 and divided by 32; a constant; 64 at <bos>; the share that is <bos>; a huge value; one per block."""
BASE = 32
HUGE_TOKEN = 319
"""Its state holds 1e5, more than float16 can."""
HUGE = 99840.0
"""1e5 as bfloat16."""


def build_ruler(folder: Path, kind: str = "llama", **overrides: Any) -> Path:
    """Save a ruler of the class `kind`: every block an MLP that writes to the block's channel, attention that averages or nothing."""
    import torch
    from transformers import AutoModelForCausalLM

    tiny.build_target(folder, kind, **overrides)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        _spell_tokens(model.model.embed_tokens.weight)
        attending = [block.self_attn for block in model.model.layers if hasattr(block, "self_attn")]
        for number, block in enumerate(model.model.layers):
            for name, parameter in block.named_parameters():
                if not name.endswith("norm.weight"):
                    parameter.zero_()
            block.mlp.gate_proj.weight[0, ONE] = block.mlp.up_proj.weight[0, ONE] = 1.0
            block.mlp.down_proj.weight[BLOCKS + number, 0] = 1.0
        attending[0].v_proj.weight[0, FIRST] = 1.0  # queries and keys are 0, so attention is the mean over all tokens seen
        attending[0].o_proj.weight[SEEN, 0] = 1.0
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _spell_tokens(embedding_VH: Any) -> None:
    embedding_VH.zero_()
    for token in range(len(embedding_VH)):
        embedding_VH[token, LOW], embedding_VH[token, HIGH], embedding_VH[token, ONE] = token % BASE, token // BASE, 16.0
    embedding_VH[0, FIRST] = 64.0
    embedding_VH[HUGE_TOKEN, BIG] = 1e5


def tokens_read(states_TH: np.ndarray) -> list[int]:
    """The tokens that states say they belong to."""
    return [int(token) for token in states_TH[:, LOW] + BASE * states_TH[:, HIGH]]


def blocks_read(states_TH: np.ndarray) -> set[tuple[int, ...]]:
    """The blocks that had run, by all these states; one entry when they agree."""
    return {tuple(np.flatnonzero(state[BLOCKS:]).tolist()) for state in states_TH}


def seen_read(states_TH: np.ndarray) -> np.ndarray:
    """How many tokens each row saw, itself included, when the first is <bos>; rounded as bfloat16 is, to about 1 in 100."""
    return np.asarray(states_TH[0, SEEN] / states_TH[:, SEEN])
