"""Builders that tests and benchmarks share: tiny specs, samples with known values, a tiny target's files. No pytest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_cache.common import layout, target_folder
from dflash_cache.common.fingerprint import canonical, digest_bytes
from dflash_cache.common.sample import NO_TOKEN, Sample
from dflash_cache.common.spec import CacheSpec, EngineSpec, FeatureSpec, Limits, Settings, TargetSpec, TextSpec

HIDDEN, VOCAB, NUM_LAYERS = 8, 32, 6


def make_spec(
    *,
    hidden: int = HIDDEN,
    layer_ids: Sequence[int] = (1, 2, 4),
    chunk_tokens: int = 16,
    part_tokens: int = 64,
    mantissa_bits: int = 7,
    num_layers: int = NUM_LAYERS,
    vocab: int = VOCAB,
) -> CacheSpec:
    """The spec of a tiny cache."""
    return CacheSpec(
        settings=Settings(
            target=TargetSpec(
                content_hash="0" * 64,
                architecture="LlamaForCausalLM",
                num_layers=num_layers,
                hidden_size=hidden,
                vocab_size=vocab,
                final_norm="transformers.models.llama.modeling_llama:LlamaRMSNorm",
                final_norm_eps=1e-5,
                tied_embeddings=False,
            ),
            features=FeatureSpec(layer_ids=tuple(layer_ids), verifier_layer=num_layers - 1, mantissa_bits=mantissa_bits),
            text=TextSpec(tokenizer_hash="1" * 64, chat_template_hash="2" * 64, max_length=4096),
            engine=EngineSpec(name="fake", version="0"),
        ),
        limits=Limits(chunk_tokens=chunk_tokens, part_tokens=part_tokens, part_seconds=600),
    )


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bit patterns, truncated."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def make_sample(
    number: int, length: int, spec: CacheSpec, *, prompt: int | None = None, next_token: int = NO_TOKEN, seed: int = 0, source: str = "data.jsonl"
) -> Sample:
    """A document of `length` tokens whose first `prompt` (default: a third) are unsupervised; states are seeded noise."""
    rng = np.random.default_rng((seed, number))
    loss_mask = np.ones(length, np.uint8)
    loss_mask[: length // 3 if prompt is None else prompt] = 0
    return Sample(
        key=number.to_bytes(16, "little"),
        source=source,
        source_row=number,
        input_ids=rng.integers(4, spec.settings.target.vocab_size, length).astype(np.int32),
        loss_mask=loss_mask,
        hidden_states=to_bf16_bits(rng.normal(0, 1, (length, len(spec.layer_ids), spec.hidden_size))),
        verifier_last_hidden_states=to_bf16_bits(rng.normal(0, 1, (length, spec.hidden_size))),
        engine_top1=int(rng.integers(4, spec.settings.target.vocab_size)),
        next_token=next_token,
    )


def write_target_files(cache: Path, spec: CacheSpec, seed: int = 0) -> None:
    """`target/` of a tiny random target: head, norm, token table and config."""
    import torch
    from safetensors.torch import save_file

    target = spec.settings.target
    folder = cache / layout.TARGET
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "embed_tokens.weight": torch.randn(target.vocab_size, target.hidden_size, generator=generator).bfloat16(),
        "lm_head.weight": torch.randn(target.vocab_size, target.hidden_size, generator=generator).bfloat16(),
        "norm.weight": (1 + 0.1 * torch.randn(target.hidden_size, generator=generator)).bfloat16(),
    }
    save_file(tensors, folder / layout.HEAD_FILE)
    config = {
        "architectures": [target.architecture],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": target.hidden_size // 2,
        "intermediate_size": 2 * target.hidden_size,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {
        "vocab_size": target.vocab_size,
        "tokenizer_size": target.vocab_size,
        "mask_token_id": None,
        "pad_token_id": 2,
        "bos_token_id": 1,
        "eos_token_ids": [2],
        "special_token_ids": [0, 1, 2, 3],
    }
    (folder / layout.TOKENS_JSON).write_text(json.dumps(tokens))
    target_folder.seal(folder)


def link_parts(cache: Path, names: int) -> None:
    """Give the cache's first part `names` names in all: the same files, linked, each under a manifest of its own."""
    first = cache / "parts/00000000-0000"
    for number in range(1, names):
        part = cache / "parts" / f"{number:08d}-0000"
        shutil.copytree(first, part, copy_function=os.link)
        document = json.loads((part / "zarr.json").read_text())
        body = document["attributes"]["dflash"] | {"part": part.name}
        body.pop("digest")
        document["attributes"]["dflash"] = body | {"digest": digest_bytes(canonical(body))}
        (part / "zarr.json").unlink()
        (part / "zarr.json").write_bytes(canonical(document))
