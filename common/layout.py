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
LOG: Final = "extract.log.jsonl"
QUARANTINE: Final = "quarantine"
TARGETS: Final = "targets"
ZARR_JSON: Final = "zarr.json"

HIDDEN_STATES: Final = "hidden_states"
VERIFIER: Final = "verifier_last_hidden_states"
EXPONENT: Final = "exponent"
SIGN_MANTISSA: Final = "sign_mantissa"
PLANES: Final = (EXPONENT, SIGN_MANTISSA)
CHUNK_CHECKSUMS: Final = "chunk_crc32c"
TEACHER_TOKENS: Final = "teacher_tokens"

_PART_NAME = re.compile(r"(\d{8})-(\d{4})")


def part_name(number: int, writer: int) -> str:
    """`NNNNNNNN-WWWW`: the number of the part among those of its writer, and the writer's id."""
    return f"{number:08d}-{writer:04d}"


def seat_name(writer: int) -> str:
    """The folder under `partial/` whose lock a writer holds."""
    return f"writer-{writer:04d}"


def parse_part_name(name: str) -> tuple[int, int] | None:
    """(number, writer) of a part's folder name, or None when it is no such name."""
    match = _PART_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def shard_path(array: str, plane: str, layer_slot: int | None) -> str:
    """Path, inside a part, of the shard file of one plane; `layer_slot` is the index on the layer axis, None for [T, H]."""
    return f"{array}/{plane}/c/0/{layer_slot}/0" if layer_slot is not None else f"{array}/{plane}/c/0/0"


def shards(layers: int) -> list[tuple[str, str, int | None]]:
    """(array, plane, slot) of every shard of a part with `layers` stored layers, in the order of `chunk_crc32c`'s rows."""
    slots: list[tuple[str, int | None]] = [(HIDDEN_STATES, slot) for slot in range(layers)]
    return [(array, plane, slot) for array, slot in [*slots, (VERIFIER, None)] for plane in PLANES]


def only_chunk(array: str, dimensions: int) -> str:
    """Path, inside a part, of the one chunk of a small array."""
    return f"{array}/c/" + "/".join("0" for _ in range(dimensions))
