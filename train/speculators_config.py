"""A drafter in the words of the speculators library: its config.json, written and read.

In: a DrafterSpec and the target's name, or the document. Out: the other. Layer ids there count block inputs: id k + 1 is the
output of block k. Sources: speculators 0.9, `DFlashSpeculatorConfig`, which fills in Qwen3's defaults and does not hold the
target's depth (ours does, beside its fields, and the library keeps it); vLLM 0.32, `configs/speculators/algos.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..common.errors import InputError
from .drafter_spec import MOST_LAYERS, SLIDING, DrafterSpec, problems_of
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
VERSION = "0.9.0"
"""Of the library whose form this is."""


@dataclass(frozen=True)
class Verifier:
    """The target, as the folder names it."""

    name: str | None
    """A Hugging Face name or a path; `vllm serve FOLDER` takes it for the model."""
    architectures: tuple[str, ...]


def speculators_config(spec: DrafterSpec, dtype: str, verifier: Verifier) -> dict[str, Any]:
    """The config.json. There is no `model_type` at its top: vLLM knows the form by its absence.

    vLLM 0.32 makes of `sliding_window_non_causal` one causal flag for all layers, while the library means sliding layers alone.
    So it is true when no layer slides and false when all do, where both readings agree; a mix has no right value.
    """
    slides = SLIDING in spec.layer_types
    layer: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": spec.rms_norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": False,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "layer_types": list(spec.layer_types),
        "use_sliding_window": slides,
        "sliding_window": spec.sliding_window if slides else None,
        "dtype": dtype,
    }
    if spec.logit_scale != 1.0:
        layer["logit_scale"] = spec.logit_scale
    if spec.logit_softcap is not None:
        layer["final_logit_softcapping"] = spec.logit_softcap
    proposal = {"proposal_type": "greedy", "speculative_tokens": spec.num_drafted, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["DFlashDraftModel"],
        MARK: "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": spec.draft_vocab_size or spec.vocab_size,
        "target_hidden_size": spec.hidden_size,
        "num_target_layers": spec.num_target_layers,
        "aux_hidden_state_layer_ids": [number + 1 for number in spec.target_layer_ids],
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": spec.sample_from_anchor,
        "sliding_window_non_causal": not slides,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def drafter_from_speculators(config: Mapping[str, Any], num_target_layers: int | None, place: str) -> DrafterSpec:
    """The spec of a speculators folder. num_target_layers: the target's depth, where the folder does not say it.

    Raises InputError for another algorithm, for what our drafter has no form of, and when nothing says the depth.
    """
    if config.get(MARK) != "dflash":
        raise InputError("is no DFlash drafter", place=place, found=config.get(MARK), expected=f"{MARK} 'dflash'")
    own = config.get("transformer_layer_config")
    if not isinstance(own, Mapping) or own.get("model_type", "qwen3") != "qwen3":
        raise InputError(
            "must describe Qwen3 layers", place=f"{place} transformer_layer_config", found=own.get("model_type") if isinstance(own, Mapping) else own
        )
    layer = {**DEFAULTS, **own}
    layers = layer["num_hidden_layers"]
    kinds: Any = layer.get("layer_types") or ["full_attention"] * (layers if isinstance(layers, int) and layers <= MOST_LAYERS else 0)
    slides = isinstance(kinds, list) and SLIDING in kinds
    if slides and config.get("sliding_window_non_causal"):
        problem = "has sliding layers that see later slots, which no layer here does"
        raise InputError(problem, place=place, found="sliding_window_non_causal true", expected="false, or full attention only")
    depth = config.get("num_target_layers", num_target_layers)
    if depth is None:
        problem, fix = "does not say how many blocks its target has", 'add "num_target_layers" to it, or use it together with a cache'
        raise InputError(problem, place=place, expected="num_target_layers", fix=fix)
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
            sliding_window=layer.get("sliding_window") if slides else None,
            block_size=config["block_size"],
            mask_token_id=config["mask_token_id"],
            target_layer_ids=tuple(number - 1 for number in config["aux_hidden_state_layer_ids"]),
            num_target_layers=depth,
            vocab_size=layer["vocab_size"],
            draft_vocab_size=None if config.get("draft_vocab_size") in (None, layer["vocab_size"]) else config["draft_vocab_size"],
            sample_from_anchor=bool(config.get("sample_from_anchor", False)),
            logit_scale=layer.get("logit_scale", 1.0),
            logit_softcap=layer.get("final_logit_softcapping"),
        )
    except KeyError as error:
        raise InputError(f"has no {error.args[0]}", place=place) from None
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot be used: {problems_of(error)}", place=place) from None
