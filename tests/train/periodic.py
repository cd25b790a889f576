"""A cache on which a tiny drafter learns to draft nearly everything, and loses it with any convention that is wrong.

Documents repeat five random tokens. A token is three digits; each of three layers knows one digit of its own row's token, so a slot
must look back five positions (rotary base, positions, windows), read every layer (ids, order), and ask as the mask token does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import make_spec, to_bf16_bits
from safetensors.torch import save_file
from tiny_run import config

from dflash_cache.common import layout, target_folder
from dflash_cache.common.sample import Sample
from dflash_cache.common.spec import CacheSpec
from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train.run import run

HIDDEN, VOCAB, FIRST, PERIOD, LAYERS = 16, 32, 4, 5, (0, 1, 2, 3, 4)
MASK, DRAFTER_LAYERS = 3, (1, 2, 3)


def digits(ids: np.ndarray) -> np.ndarray:
    """[T] -> [T, 3]: of ids from FIRST on, base 3."""
    return np.stack([(ids - FIRST) // 9 % 3, (ids - FIRST) // 3 % 3, (ids - FIRST) % 3], axis=1)


def rotations(count: int) -> np.ndarray:
    """Random orthogonal matrices, [count, H, H]."""
    return np.linalg.qr(np.random.default_rng(1).normal(size=(count, HIDDEN, HIDDEN)))[0]


def codes(ids: np.ndarray) -> np.ndarray:
    """[T, H]: one 1 for each digit, the same for head and verifier."""
    out = np.zeros((len(ids), HIDDEN))
    for place, digit in enumerate(digits(ids).T):
        out[np.arange(len(ids)), 3 * place + digit] = 1
    return out


def sample(number: int, length: int, prompt: int, next_token: bool = False, seed: int = 0) -> Sample:
    """A document; its verifier states predict its own tokens. next_token: one more token follows its last row."""
    rng = np.random.default_rng((seed, number))
    ids = np.resize(rng.integers(FIRST, FIRST + 27, PERIOD), length + 1)
    shown = codes(ids[:-1])
    parts = {0: np.roll(shown, -6, 1), 4: rng.normal(size=shown.shape)} | {1 + place: shown * (np.arange(HIDDEN) // 3 == place) for place in range(3)}
    states = np.stack([parts[layer] @ rotations(6)[layer] + rng.normal(0, 0.05, shown.shape) for layer in LAYERS], axis=1)
    return Sample(
        key=number.to_bytes(16, "little"),
        source="data.jsonl",
        source_row=number,
        input_ids=ids[:-1].astype(np.int32),
        loss_mask=(np.arange(length) >= prompt).astype(np.uint8),
        hidden_states=to_bf16_bits(states),
        verifier_last_hidden_states=to_bf16_bits(codes(ids[1:])),
        engine_top1=int(ids[-1]),
        next_token=int(ids[-1]) if next_token else -1,
    )


def write_target(cache: Path, spec: CacheSpec) -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.zeros(VOCAB, HIDDEN)
    head[FIRST : FIRST + 27] = torch.from_numpy(codes(np.arange(FIRST, FIRST + 27))).float()
    folder = cache / layout.TARGET
    folder.mkdir(parents=True, exist_ok=True)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    norm = torch.tensor([1.0] * 9 + [-3.0] * 7)  # the head reads nine numbers; the others show whether a state was normed that should not be
    tensors = {"embed_tokens.weight": embedding, "lm_head.weight": head, "norm.weight": norm}
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / layout.HEAD_FILE)
    shape = {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes = {"intermediate_size": 32, "max_position_embeddings": 4096, "rope_theta": 10000.0, "num_hidden_layers": spec.settings.target.num_layers}
    (folder / "config.json").write_text(json.dumps(shape | sizes))
    tokens = {
        "vocab_size": VOCAB,
        "tokenizer_size": VOCAB,
        "pad_token_id": 2,
        "bos_token_id": 1,
        "eos_token_ids": [2],
        "special_token_ids": [0, 1, 2, 3],
    }
    (folder / layout.TOKENS_JSON).write_text(json.dumps(tokens))
    target_folder.seal(folder)


def write(cache: Path, documents: int, length: int = 36, prompt: int = 12, seed: int = 0) -> Path:
    spec = make_spec(hidden=HIDDEN, layer_ids=LAYERS, vocab=VOCAB, chunk_tokens=64, part_tokens=4096)
    open_cache(cache, spec)
    write_target(cache, spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        writer = CacheWriter(cache, spec)
        for number in range(documents):
            writer.add(sample(number, length, prompt, seed=seed))
        writer.close()
    return cache


def trained(folder: Path, **model: object) -> Path:
    """A run that drafts nearly everything right, in four seconds; `held-out` lies beside it."""
    cache = write(folder / "train", 60, length=48)
    write(folder / "held-out", 6, seed=9)
    sizes = {"target_layer_ids": DRAFTER_LAYERS, "mask_token_id": MASK, "num_layers": 1, "head_dim": 16, **model}
    fast = {"steps": 150, "lr": 3e-2, "weight_decay": 0.0}
    run(config(data={"row_tokens": 480}, model=sizes, optim=fast, run={"checkpoint_every": 50, "keep": 3}), [cache], folder / "run")
    return folder
