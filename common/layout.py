"""Every file and folder name inside a cache. FORMAT.md says what each holds."""

from __future__ import annotations

import re
from typing import Final

FORMAT_NAME: Final = "dflash-cache"
FORMAT_VERSION: Final = 1

CACHE_JSON: Final = "cache.json"
TARGET: Final = "target"
HEAD_FILE: Final = "head.safetensors"
TOKENS_JSON: Final = "tokens.json"
PARTS: Final = "parts"
PARTIAL: Final = "partial"
REJECTS: Final = "rejects.jsonl"
ZARR_JSON: Final = "zarr.json"

HIDDEN_STATES: Final = "hidden_states"
VERIFIER: Final = "verifier_last_hidden_states"
EXPONENT: Final = "exponent"
SIGN_MANTISSA: Final = "sign_mantissa"
PLANES: Final = (EXPONENT, SIGN_MANTISSA)

_PART_NAME = re.compile(r"(\d{8})-(\d{4})")


def part_name(number: int, writer: int) -> str:
    """`NNNNNNNN-WWWW`: the number of the part among those of its writer, and the writer's id."""
    return f"{number:08d}-{writer:04d}"


def parse_part_name(name: str) -> tuple[int, int] | None:
    """(number, writer) of a part's folder name, or None when it is no such name."""
    match = _PART_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def shard_path(array: str, plane: str, layer_slot: int | None) -> str:
    """Path, inside a part, of the shard file of one plane; `layer_slot` is the index on the layer axis, None for [T, H]."""
    return f"{array}/{plane}/c/0/{layer_slot}/0" if layer_slot is not None else f"{array}/{plane}/c/0/0"
