"""What an exported drafter's folder says of itself, and whether it belongs to a target: before any server starts.

In: the folder's config.json, in the z-lab or the speculators form, and the target's sizes. Out: how many tokens it drafts at once.
Reads no weights. What the engines read from where: vLLM 0.32, method `dflash`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import InputError
from ..common.spec import TargetSpec


@dataclass(frozen=True)
class ServedDrafter:
    """The facts that serving depends on."""

    folder: Path
    block_size: int
    hidden_size: int | None
    """The target's, as the folder says; None when it does not."""
    vocab_size: int | None
    num_target_layers: int | None
    last_layer: int | None
    """The highest target block that it reads, 0-based."""
    layers: int
    """How many it reads."""

    @property
    def most_tokens(self) -> int:
        """It can draft at most so many tokens at once: all slots but the anchor's."""
        return self.block_size - 1


def read_drafter(folder: Path) -> ServedDrafter:
    """Read the folder's config.json. Raises InputError when there is none, it cannot be used, or vLLM would not serve it."""
    place, path = f"--drafter {folder}", folder / "config.json"
    if not path.is_file():
        run = (folder / "checkpoints").is_dir()
        raise InputError(
            f"is {'a run' if run else 'no exported drafter'}: it has no config.json",
            place=place,
            expected="a folder written by `dflash export`",
            fix=f"dflash export {folder} --to FOLDER, then name that folder" if run else "export the run first",
        )
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"its config.json cannot be read: {error}", place=place, fix="export again") from None
    if not isinstance(raw, dict):
        raise InputError("its config.json holds no object", place=place, fix="export again")
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise InputError("its config.json has a dflash_config that is no object", place=place, found=nested, fix="export again")
    sizes = [size for size in (raw.get("block_size"), nested.get("block_size")) if size is not None]
    size = sizes[0] if sizes else None
    if not isinstance(size, int) or isinstance(size, bool) or size < 2 or any(other != size for other in sizes):
        found = f"block_size {raw.get('block_size')}, dflash_config.block_size {nested.get('block_size')}"
        raise InputError("its config.json has no usable block_size", place=place, found=found, expected="one number from 2", fix="export again")
    if raw.get("sample_from_anchor"):
        raise InputError("drafts from its anchor too, which vLLM's method dflash does not serve", place=place, fix="train without sample_from_anchor")
    speculators = raw.get("transformer_layer_config")
    shape: dict[str, Any] = speculators if isinstance(speculators, dict) else raw
    if isinstance(speculators, dict):
        ids, first = raw.get("aux_hidden_state_layer_ids") or [], 1  # speculators count the input of a block
    else:
        ids, first = nested.get("target_layer_ids") or raw.get("target_layer_ids") or [], 0
    if not isinstance(ids, list) or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in ids):
        raise InputError(
            "its config.json names no layers of the target", place=place, found=ids, expected="a list of whole numbers", fix="export again"
        )
    hidden = raw.get("target_hidden_size") or shape.get("hidden_size")
    return ServedDrafter(folder, size, hidden, shape.get("vocab_size"), raw.get("num_target_layers"), max(ids) - first if ids else None, len(ids))


def check_belongs(drafter: ServedDrafter, target: TargetSpec, model: str) -> None:
    """Raise InputError when the sizes that the folder states are not the target's.

    Some trainers write the number of layers that are read as `num_target_layers`, so that is no contradiction.
    """
    pairs = [("hidden size", drafter.hidden_size, target.hidden_size), ("embedding rows", drafter.vocab_size, target.vocab_size)]
    if drafter.num_target_layers != drafter.layers:
        pairs.append(("blocks", drafter.num_target_layers, target.num_layers))
    odd = [(name, ours, theirs) for name, ours, theirs in pairs if ours is not None and ours != theirs]
    if not odd and drafter.last_layer is not None and drafter.last_layer >= target.num_layers:
        odd = [("reads block", drafter.last_layer, target.num_layers - 1)]
    if odd:
        raise InputError(
            "the drafter was made for another target",
            place=f"--drafter {drafter.folder}",
            found=", ".join(f"{name} {ours}" for name, ours, _ in odd),
            expected=f"{', '.join(f'{name} {theirs}' for name, _, theirs in odd)}, as {model}",
            fix="name the target that it was trained for, or another drafter",
        )


def speculative_tokens(drafter: ServedDrafter, wanted: int | None) -> int:
    """Tokens to draft at once. Raises InputError for more than a block has."""
    if wanted is not None and wanted > drafter.most_tokens:
        raise InputError(
            f"a block of {drafter.block_size} is the anchor and {drafter.most_tokens} drafted tokens",
            place="--num-speculative-tokens",
            found=wanted,
            expected=f"1 to {drafter.most_tokens}",
            fix="leave it out, or train with a larger model.block_size",
        )
    return wanted or drafter.most_tokens
