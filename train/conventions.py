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
from .drafter_spec import FULL, MOST_LAYERS, MOST_SLOTS, SLIDING, DrafterSpec
from .speculators_config import DEFAULTS, MARK

MOST = 1e30
"""Of a positive number; float32 ends soon after."""
MOST_WHOLE = 2**31 - 1


@dataclass(frozen=True)
class _Form:
    """What vLLM fills in for a document of one of the two forms."""

    defaults: Mapping[str, Any]
    """For fields that are left out."""
    rope_theta: float
    window_alone: bool
    """`sliding_window` counts whatever `use_sliding_window` says."""


ZLAB = _Form(DEFAULTS, DEFAULTS["rope_theta"], False)
"""Read through transformers' Qwen3Config."""
SPECULATORS = _Form({}, 1_000_000.0, True)
"""Read through vLLM's SpeculatorsConfig, which knows no defaults; `set_default_rope_theta` in `qwen3_dflash.py` gives the base."""


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
        if MARK in config:
            return _read(_translated(config), SPECULATORS, place)
        return _read(config, ZLAB, place)
    except KeyError as error:
        raise InputError(f"has no {error.args[0]}", place=place) from None
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot be used: {error}", place=place) from None


def _translated(config: Mapping[str, Any]) -> dict[str, Any]:
    """A speculators document as vLLM rewrites it."""
    ids = _ids(config["aux_hidden_state_layer_ids"], "aux_hidden_state_layer_ids")
    nested = {
        "mask_token_id": config["mask_token_id"],
        "sample_from_anchor": config.get("sample_from_anchor", False),
        "causal": not config.get("sliding_window_non_causal", True),  # of all layers, full ones too
    }
    methods = _part(config, "speculators_config").get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], Mapping):
        raise TypeError(f"speculators_config.proposal_methods is no list of objects: {methods}")
    size = _whole(methods[0], "speculative_tokens", 1, MOST_SLOTS - 1) + 1 if "speculative_tokens" in methods[0] else _whole(config, "block_size", 2)
    own = dict(_part(config, "transformer_layer_config"))
    return {**own, "dflash_config": nested, "eagle_aux_hidden_state_layer_ids": ids, "block_size": size}


def _read(config: Mapping[str, Any], form: _Form, place: str) -> Conventions:
    nested = _part(config, "dflash_config")
    layer = {**form.defaults, **config}
    layers = _whole(layer, "num_hidden_layers", 1, MOST_LAYERS)
    heads, groups = (_whole(layer, name, 1) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads % groups:
        raise ValueError(f"{heads} query heads do not share {groups} key and value heads evenly")
    if layer.get("head_dim") is None:  # of Qwen3's own config vLLM always sees one
        layer["head_dim"] = _whole(layer, "hidden_size", heads) // heads
    if (head_dim := _whole(layer, "head_dim", 1)) % 2:
        raise ValueError(f"head_dim must be even for rotary positions, not {head_dim}")
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == layers and set(map(str, kinds)) <= {SLIDING, FULL}):
        raise InputError("layer_types does not name every layer", place=place, found=kinds, expected=f"{layers} times {FULL} or {SLIDING}")
    kinds = kinds or [FULL] * layers
    slides = [kind == SLIDING for kind in kinds]
    if nested.get("use_swa") and not any(slides):
        slides = [True] * layers
    window = nested.get("swa_window_size", config.get("sliding_window") if config.get("use_sliding_window") or form.window_alone else None)
    if any(slides) and (not isinstance(window, int) or isinstance(window, bool) or not 1 <= window <= MOST_WHOLE):
        expected = "sliding_window" if form.window_alone else "sliding_window, and use_sliding_window true"
        raise InputError("has sliding layers and no window", place=place, found=window, expected=expected)
    one = config.get("is_causal") if config.get("is_causal") is not None else nested.get("causal")
    return Conventions(
        layer_ids=_layer_ids(config, nested, place),
        block_size=_whole(nested if "block_size" in nested else config, "block_size", 2, MOST_SLOTS),
        mask_token_id=_whole(nested if "mask_token_id" in nested else config, "mask_token_id", 0),
        num_heads=heads,
        num_groups=groups,
        head_dim=head_dim,
        norm_eps=_positive(layer, "rms_norm_eps"),
        rope_theta=_rope_theta(config, form, place),
        windows=tuple(window if slide else None for slide in slides),
        causal=tuple((kind == SLIDING) if one is None else bool(one) for kind in kinds),
        first_slot=0 if nested.get("sample_from_anchor") else 1,
        interleaved_rope=not config.get("is_neox_style", True),
        logit_scale=_positive({"logit_scale": 1.0, **config}, "logit_scale"),
    )


def _layer_ids(config: Mapping[str, Any], nested: Mapping[str, Any], place: str) -> tuple[int, ...]:
    """0-based. The target hands its blocks' outputs over in the order in which it computes them, whatever the order here."""
    aux = config.get("eagle_aux_hidden_state_layer_ids")
    ids = aux or nested.get("target_layer_ids") or config.get("target_layer_ids")
    if not ids:
        raise InputError("has no target_layer_ids", place=place)
    return tuple(sorted({number - bool(aux) for number in _ids(ids, "eagle_aux_hidden_state_layer_ids" if aux else "target_layer_ids")}))


def _rope_theta(config: Mapping[str, Any], form: _Form, place: str) -> float:
    rope = _part(config, "rope_parameters") or _part(config, "rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError("has rotary positions of a kind that no DFlash drafter is trained with", place=place, found=rope)
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return _positive({"rope_theta": form.rope_theta if theta is None else theta}, "rope_theta")


def _part(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object inside of the document; none is an empty one."""
    found = holder.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise TypeError(f"{name} is no object: {found!r}")
    return found or {}


def _whole(holder: Mapping[str, Any], name: str, least: int, most: int = MOST_WHOLE) -> int:
    value = holder[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise TypeError(f"{name} is no whole number from {least} to {most}: {value!r}")
    return value


def _positive(holder: Mapping[str, Any], name: str) -> float:
    value = holder[name]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < MOST:
        raise TypeError(f"{name} is no positive number: {value!r}")
    return float(value)


def _ids(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(number, int) and not isinstance(number, bool) for number in value):
        raise TypeError(f"{name} is no list of whole numbers: {value!r}")
    return value
