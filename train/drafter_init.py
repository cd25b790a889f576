"""What a drafter starts from: random weights, another drafter's, or the target's own layers.

In: a drafter with random weights, an InitConfig and the target's head. Out: the drafter, filled, and a line that says with what.
Sources that do not fit are refused, naming both sides; nothing is cut, padded or passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..common.errors import InputError
from .config import InitConfig
from .draft_head import offsets
from .drafter import Drafter
from .drafter_folder import load_drafter
from .drafter_spec import DrafterSpec
from .reader import CacheReader
from .target_head import TargetHead
from .target_layers import spread_blocks, target_tensors
from .vocabulary import coverage, kept_tokens, supervised_counts

TARGET = "target:"
MUST_AGREE = (
    *("target_layer_ids", "num_target_layers", "vocab_size", "hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "rope_theta", "rms_norm_eps", "mask_token_id", "sample_from_anchor"),
)
"""Sizes, and what the weights mean. Block size, window, kinds of attention and draft vocabulary may change between two trainings."""


def first_drafter(
    spec: DrafterSpec,
    init: InitConfig,
    readers: Sequence[CacheReader],
    head: TargetHead,
    generator: torch.Generator,
    fresh: bool = True,
    held: Sequence[np.ndarray] | None = None,
) -> tuple[Drafter, list[str]]:
    """The drafter that a run starts with, and lines that say how it came about.

    A pruned vocabulary is chosen from the caches' tokens. held: bool [S] of each cache, samples whose tokens are left out of
    that choice. fresh: False when a checkpoint will replace the weights; `init` is then not looked at. generator: on the CPU.
    """
    drafter, lines = Drafter(spec).initialize(generator), []
    if drafter.d2t is not None:
        counts_V = supervised_counts(readers, held)
        kept = kept_tokens(counts_V, len(drafter.d2t))
        drafter.d2t.copy_(offsets(torch.from_numpy(kept)))
        lines.append(
            f"vocabulary {len(kept):,} of {spec.vocab_size:,} tokens can be drafted; they are {coverage(counts_V, kept):.2%} of the supervised ones"
        )
    if fresh:
        lines.append(f"starts    from {initialize_from(drafter, init, head)}")
    return drafter, lines


def initialize_from(drafter: Drafter, init: InitConfig, head: TargetHead) -> str:
    """Overwrite the drafter's weights with those that `init` names; its vocabulary stays. Returns a line for people.

    Raises InputError when the source cannot be read or does not fit, naming what it has and what this run has.
    """
    if init.source is None:
        return "random weights"
    if init.source.startswith(TARGET):
        folder = Path(init.source.removeprefix(TARGET))
        tensors = target_tensors(folder, drafter.spec, head.norm, init.target_blocks)
        blocks = init.target_blocks or spread_blocks(drafter.spec.num_layers, drafter.spec.num_target_layers)
        line = f"blocks {', '.join(map(str, blocks))} and the final norm of {folder}; fc and hidden_norm are new"
    else:
        folder = Path(init.source)
        other = load_drafter(folder, drafter.spec.num_target_layers)
        check_agrees(other.spec, drafter.spec, folder)
        tensors, line = dict(other.named_parameters()), f"all weights of {folder}"
    parameters = dict(drafter.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
    return line


def check_agrees(theirs: DrafterSpec, ours: DrafterSpec, folder: Path) -> None:
    """Raise InputError that names every difference in what the weights mean."""
    odd = [name for name in MUST_AGREE if getattr(theirs, name) != getattr(ours, name)]
    if odd:
        lines = "".join(f"\n  - {name}: it has {_shown(getattr(theirs, name))}, this run {_shown(getattr(ours, name))}" for name in odd)
        fix = "set [model] to what it has, or use a cache that holds its layers"
        raise InputError(f"this drafter's weights mean something else:{lines}", place=f"init.from {folder}", fix=fix)


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
