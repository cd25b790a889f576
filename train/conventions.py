"""Conventions: everything besides its tensors that decides what a served drafter drafts, as the serving engine reads it.

In: a folder's config.json, z-lab's or speculators'. Out: a record, read with vLLM 0.32's own precedence and defaults, which differ
from those of our exporter on purpose: this is the other side's reading. No torch.
Sources: vLLM `qwen3_dflash.py`, `eagle3_utils.py`, `configs/speculators/algos.py`; transformers 5 `Qwen3Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..common.errors import InputError
from .drafter_spec import SLIDING, DrafterSpec
from .speculators_config import DEFAULTS, MARK


@dataclass(frozen=True)
class Conventions:
    """How to run a drafter's tensors."""

    layer_ids: tuple[int, ...]
    """Target blocks whose outputs feed `fc`, 0-based, in the order of its columns."""
    block_size: int
    """B: the anchor and B - 1 mask tokens."""
    mask_token_id: int
    """Token in slots 1..B-1."""
    num_heads: int
    """N, query heads."""
    num_groups: int
    """G, key/value heads."""
    head_dim: int
    """E."""
    norm_eps: float
    """Epsilon of every norm."""
    rope_theta: float
    """Rotary base."""
    windows: tuple[int | None, ...]
    """Of each layer, W: positions, its own included, that a slot may look back; None: all."""
    causal: tuple[bool, ...]
    """Of each layer: a slot sees only the slots up to its own."""
    first_slot: int = 1
    """Slot that proposes the first drafted token, the one after the anchor."""
    position_offset: int = 0
    """Added to the positions of a block; 0: the anchor has its own position in the document."""
    own_row: bool = False
    """The context holds the anchor's own row too."""
    normed_last: bool = False
    """The last selected layer's states come after the target's final norm."""
    interleaved_rope: bool = False
    """Rotary pairs are (2i, 2i + 1) in place of (i, i + E/2)."""
    embedding_scale: float = 1.0
    """Factor on the block's embeddings."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    logit_softcap: float | None = None
    """Bound of the logits."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)


def trained_conventions(spec: DrafterSpec) -> Conventions:
    """What the trainer does for this drafter."""
    slides = [kind == SLIDING for kind in spec.layer_types]
    return Conventions(
        layer_ids=spec.target_layer_ids,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        num_heads=spec.num_attention_heads,
        num_groups=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope_theta,
        windows=tuple(spec.sliding_window if slide else None for slide in slides),
        causal=tuple(slides),
        first_slot=spec.first_slot,
        logit_scale=spec.logit_scale,
        logit_softcap=spec.logit_softcap,
    )


def served_conventions(config: Mapping[str, Any], place: str) -> Conventions:
    """What vLLM 0.32 makes of a config.json. Raises InputError where vLLM would refuse it, or where a field has no form here."""
    try:
        return _read(_translated(config), place)
    except KeyError as error:
        raise InputError(f"has no {error.args[0]}", place=place) from None
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot be used: {error}", place=place) from None


def _translated(config: Mapping[str, Any]) -> dict[str, Any]:
    """A speculators document as vLLM rewrites it; another one as it is."""
    if MARK not in config:
        return dict(config)
    ids = config["aux_hidden_state_layer_ids"]
    nested = {
        "mask_token_id": config["mask_token_id"],
        "sample_from_anchor": config.get("sample_from_anchor", False),
        "causal": not config.get("sliding_window_non_causal", True),  # of all layers, full ones too
    }
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafts = methods[0].get("speculative_tokens", config.get("block_size", 0) - 1)
    own = dict(config.get("transformer_layer_config") or {})
    return {**own, "dflash_config": nested, "eagle_aux_hidden_state_layer_ids": ids, "block_size": drafts + 1}


def _read(config: Mapping[str, Any], place: str) -> Conventions:
    nested = config.get("dflash_config") or {}
    layer = {**DEFAULTS, **config}
    layers = int(layer["num_hidden_layers"])
    kinds = config.get("layer_types") or ["full_attention"] * layers  # transformers fills it in, so that vLLM never sees none
    if len(kinds) != layers:
        raise InputError("layer_types does not name every layer", place=place, found=len(kinds), expected=f"{layers} layers")
    slides = [kind == SLIDING for kind in kinds]
    if nested.get("use_swa") and not any(slides):
        slides = [True] * layers
    window = nested.get("swa_window_size", config.get("sliding_window") if config.get("use_sliding_window") else None)
    if any(slides) and window is None:
        raise InputError("has sliding layers and no window", place=place, expected="sliding_window, and use_sliding_window true")
    one = config.get("is_causal") if config.get("is_causal") is not None else nested.get("causal")
    return Conventions(
        layer_ids=_layer_ids(config, nested, place),
        block_size=int(nested["block_size"] if "block_size" in nested else config["block_size"]),
        mask_token_id=int(nested["mask_token_id"] if "mask_token_id" in nested else config["mask_token_id"]),
        num_heads=layer["num_attention_heads"],
        num_groups=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        norm_eps=layer["rms_norm_eps"],
        rope_theta=_rope_theta(config, place),
        windows=tuple(window if slide else None for slide in slides),
        causal=tuple((kind == SLIDING) if one is None else bool(one) for kind in kinds),
        first_slot=0 if nested.get("sample_from_anchor") else 1,
        interleaved_rope=not config.get("is_neox_style", True),
        logit_scale=config.get("logit_scale", 1.0),
    )


def _layer_ids(config: Mapping[str, Any], nested: Mapping[str, Any], place: str) -> tuple[int, ...]:
    """0-based. The target hands its blocks' outputs over in the order in which it computes them, whatever the order here."""
    aux = config.get("eagle_aux_hidden_state_layer_ids")
    ids = [number - 1 for number in aux] if aux else nested.get("target_layer_ids") or config.get("target_layer_ids")
    if not ids:
        raise InputError("has no target_layer_ids", place=place)
    return tuple(sorted(set(ids)))


def _rope_theta(config: Mapping[str, Any], place: str) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError("has rotary positions of a kind that no DFlash drafter is trained with", place=place, found=rope)
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return float(DEFAULTS["rope_theta"] if theta is None else theta)
