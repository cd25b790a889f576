"""TargetShape: the sizes that a drafter inherits, read from the target's own config.json.

In: the parsed config of any target, text sizes possibly under `text_config`, rotary settings in any of the forms that
transformers 4 and 5 write. Out: a TargetShape, with None for what cannot be read. Needs no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common import target_folder
from ..common.errors import CacheDamaged

FULL = "full_attention"


@dataclass(frozen=True)
class TargetShape:
    """What a drafter takes over by default. Head sizes only: never partial rotary factors or multi-axis positions."""

    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    intermediate_size: int | None
    rope_theta: float | None
    max_position_embeddings: int | None


def read_target_config(cache: Path) -> dict[str, Any]:
    """`target/config.json` of a cache. Raises CacheDamaged when it is missing, changed or no JSON object."""
    path = target_folder.check(cache, "config.json") / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CacheDamaged(f"cannot be read: {error}", place=str(path)) from None
    if not isinstance(config, dict):
        raise CacheDamaged("must be a JSON object", place=str(path), found=type(config).__name__)
    return config


def target_shape(config: Mapping[str, Any]) -> TargetShape:
    """The shape of the text model that `config` describes."""
    text = text_config(config)
    heads, hidden = _number(text, "num_attention_heads"), _number(text, "hidden_size")
    derived = hidden // heads if heads and hidden and hidden % heads == 0 else None
    return TargetShape(
        num_attention_heads=heads,
        num_key_value_heads=_number(text, "num_key_value_heads") or heads,
        head_dim=_number(text, "head_dim") or derived,
        intermediate_size=_number(text, "intermediate_size"),
        rope_theta=rope_theta(text),
        max_position_embeddings=_number(text, "max_position_embeddings"),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the text model: `text_config` of a vision-language target, else the config itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def rope_theta(text: Mapping[str, Any]) -> float | None:
    """The rotary base of the full-attention layers.

    A nested value wins over a flat one, which transformers 5 fills with a class default; among values per attention type
    that of full attention is taken.
    """
    nested = text.get("rope_parameters")
    if not isinstance(nested, Mapping):
        nested = text.get("rope_scaling")
    if isinstance(nested, Mapping):
        per_type = nested.get(FULL)
        for holder in (per_type, nested) if isinstance(per_type, Mapping) else (nested,):
            if isinstance(holder.get("rope_theta"), (int, float)):
                return float(holder["rope_theta"])
    flat = text.get("rope_theta")
    if isinstance(flat, Mapping):
        flat = flat.get(FULL)
    return float(flat) if isinstance(flat, (int, float)) and not isinstance(flat, bool) else None


def _number(text: Mapping[str, Any], name: str) -> int | None:
    """A positive whole number, or None (absent, or different for each layer)."""
    value = text.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
