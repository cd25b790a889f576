"""A drafter in the words of the serving engines: the config.json of an export in the z-lab format, and back.

In: a DrafterSpec. Out: one document that vLLM 0.32, SGLang and `dflash` 0.1.0 all read the same way: what they look for in
two places stands in both, equal. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.errors import InputError
from .drafter_spec import MOST_LAYERS, SLIDING, DrafterSpec, problems_of

ARCHITECTURE = "DFlashDraftModel"


def serving_config(spec: DrafterSpec, dtype: str) -> dict[str, Any]:
    """The config.json. Sliding layers are causal inside the block and full layers are not, which all three engines derive
    from `layer_types`; `is_causal` would override it for all layers, so it stands there only when no layer slides."""
    slides = SLIDING in spec.layer_types
    nested: dict[str, Any] = {"target_layer_ids": list(spec.target_layer_ids), "mask_token_id": spec.mask_token_id, "block_size": spec.block_size}
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
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
        "num_target_layers": spec.num_target_layers,
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
        "dflash_config": nested,
        "dtype": dtype,
    }
    if not slides:
        config["is_causal"] = False
    # The drafter's logits go through the target's head; these say how, to engines that take only its matrix. SGLang looks in
    # dflash_config, the reference in both, vLLM takes logit_scale alone; a draft's most likely token is the same without them.
    if spec.logit_scale != 1.0:
        config["output_multiplier"] = config["logit_scale"] = nested["output_multiplier"] = spec.logit_scale
    if spec.logit_softcap is not None:
        config["final_logit_softcapping"] = nested["final_logit_softcapping"] = spec.logit_softcap
    return config


def drafter_from_config(config: Mapping[str, Any], place: str) -> DrafterSpec:
    """Undo `serving_config`; also reads folders of this form that others wrote.

    Raises InputError for another architecture, a missing field, or a field that says different things in its two places.
    """
    if config.get("architectures") != [ARCHITECTURE]:
        raise InputError("is no DFlash drafter", place=place, found=config.get("architectures"), expected=f"architectures [{ARCHITECTURE!r}]")
    nested = _part(config, "dflash_config", place)

    def one(name: str, default: Any = None) -> Any:
        values = [holder[name] for holder in (nested, config) if holder.get(name) is not None] or ([default] if default is not None else [])
        if not values:
            raise InputError(f"has no {name}", place=place, expected=f"{name} in dflash_config or at the top level")
        if any(value != values[0] for value in values):
            raise InputError(f"says two different things of {name}", place=place, found=" and ".join(map(str, values)), fix="make both agree")
        return values[0]

    rope = _part(config, "rope_parameters", place).get("rope_theta"), config.get("rope_theta")
    if None not in rope and rope[0] != rope[1]:
        raise InputError("says two different things of rope_theta", place=place, found=f"{rope[0]} and {rope[1]}")
    layers = config.get("num_hidden_layers")
    kinds: Any = config.get("layer_types") or ["full_attention"] * (layers if isinstance(layers, int) and layers <= MOST_LAYERS else 0)
    try:
        return DrafterSpec(
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate_size=config["intermediate_size"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=rope[0] if rope[0] is not None else config["rope_theta"],
            max_position_embeddings=config["max_position_embeddings"],
            layer_types=kinds,
            sliding_window=config.get("sliding_window") if isinstance(kinds, list) and SLIDING in kinds else None,
            block_size=one("block_size"),
            mask_token_id=one("mask_token_id"),
            target_layer_ids=tuple(one("target_layer_ids")),
            num_target_layers=config["num_target_layers"],
            vocab_size=config["vocab_size"],
            logit_scale=one("output_multiplier", 1.0),
            logit_softcap=one("final_logit_softcapping", 0.0) or None,
        )
    except KeyError as error:
        raise InputError(f"has no {error.args[0]}", place=place) from None
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot be used: {problems_of(error)}", place=place) from None


def _part(config: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    """An object inside of the document; none is an empty one."""
    found = config.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise InputError(f"{name} is no object", place=place, found=found)
    return found or {}
