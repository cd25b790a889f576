"""A drafter in the words of the speculators library: its config.json, read.

In: the document and the target's depth, which it does not hold. Out: a DrafterSpec. Layer ids there count block inputs: id k + 1
is the output of block k. Source: speculators 0.9, `DFlashSpeculatorConfig`, which leaves out what equals Qwen3's defaults. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.errors import InputError
from .drafter_spec import SLIDING, DrafterSpec, problems_of
from .target_shape import rope_theta

MARK = "speculators_model_type"
DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "intermediate_size": 22016,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "rope_theta": 10000.0,
}
"""Of transformers' Qwen3Config."""
NOT_TRAINED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d")
"""Tensors of such a folder that are the target's, or follow from others."""


def drafter_from_speculators(config: Mapping[str, Any], num_target_layers: int, place: str) -> DrafterSpec:
    """The spec of a speculators folder. Raises InputError for another algorithm and for what our drafter has no form of."""
    if config.get(MARK) != "dflash":
        raise InputError("is no DFlash drafter", place=place, found=config.get(MARK), expected=f"{MARK} 'dflash'")
    own = config.get("transformer_layer_config")
    if not isinstance(own, Mapping) or own.get("model_type", "qwen3") != "qwen3":
        raise InputError("must describe Qwen3 layers", place=f"{place} transformer_layer_config", found=own if own is None else own.get("model_type"))
    layer = {**DEFAULTS, **own}
    kinds = tuple(layer.get("layer_types") or ("full_attention",) * layer["num_hidden_layers"])
    if SLIDING in kinds and config.get("sliding_window_non_causal"):
        problem = "has sliding layers that see later slots, which no layer here does"
        raise InputError(problem, place=place, found="sliding_window_non_causal true", expected="false, or full attention only")
    try:
        return DrafterSpec(
            hidden_size=layer["hidden_size"],
            num_layers=layer["num_hidden_layers"],
            num_attention_heads=layer["num_attention_heads"],
            num_key_value_heads=layer["num_key_value_heads"],
            head_dim=layer["head_dim"],
            intermediate_size=layer["intermediate_size"],
            rms_norm_eps=layer["rms_norm_eps"],
            rope_theta=rope_theta(layer) or DEFAULTS["rope_theta"],
            max_position_embeddings=layer["max_position_embeddings"],
            layer_types=kinds,
            sliding_window=layer.get("sliding_window") if SLIDING in kinds else None,
            block_size=config["block_size"],
            mask_token_id=config["mask_token_id"],
            target_layer_ids=tuple(number - 1 for number in config["aux_hidden_state_layer_ids"]),
            num_target_layers=num_target_layers,
            vocab_size=layer["vocab_size"],
            draft_vocab_size=None if config.get("draft_vocab_size") in (None, layer["vocab_size"]) else config["draft_vocab_size"],
            sample_from_anchor=bool(config.get("sample_from_anchor", False)),
        )
    except KeyError as error:
        raise InputError(f"has no {error.args[0]}", place=place) from None
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot be used: {problems_of(error)}", place=place) from None
