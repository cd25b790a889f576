"""A drafter read back: from a run's folder, a checkpoint, a z-lab or a speculators folder.

In: a path. Out: a float32 Drafter on the CPU, of these very tensors. Writing folders is `export`'s; what is wrong with one
that cannot be read, `lint`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..common.errors import InputError
from . import checkpoint
from .drafter import Drafter
from .drafter_spec import DrafterSpec
from .serving_config import drafter_from_config
from .speculators_config import MARK, drafter_from_speculators
from .tensor_files import TensorFiles

CONFIG, MODEL, README = "config.json", "model.safetensors", "README.md"
EMBEDDING, HEAD, KEPT = "embed_tokens.weight", "lm_head.weight", "t2d"
NOT_TRAINED = frozenset({EMBEDDING, HEAD, KEPT, "verifier_lm_head.weight", "verifier_norm.weight"})
"""Tensors of an exported folder that are the target's, or follow from others."""

FLOATS, WHOLE = ("float32", "bfloat16", "float16", "float64"), ("int64", "int32")
"""Types of weights, and of `d2t`."""


def load_drafter(path: Path, num_target_layers: int | None = None) -> Drafter:
    """The drafter in a run folder (its newest checkpoint), a checkpoint or an exported folder; float32, on the CPU.

    num_target_layers: the target's depth, for speculators folders that do not say it. Raises InputError when there is no
    drafter, when tensors are missing, left over or of another shape, or when the config says two different things.
    """
    if (path / checkpoint.CHECKPOINTS).is_dir():
        path = checkpoint.newest(path)
    if (path / checkpoint.STATE).is_file():
        state = checkpoint.load_state(path)
        return fill_drafter(state.drafter, checkpoint.load_tensors(path, state, checkpoint.served_weights(state)), path)
    if not (path / CONFIG).is_file():
        raise InputError("holds no drafter", place=str(path), expected="a run folder, a checkpoint or an exported folder", fix="check the path")
    config, place = read_config(path / CONFIG), str(path / CONFIG)
    spec = drafter_from_speculators(config, num_target_layers, place) if MARK in config else drafter_from_config(config, place)
    left_out = NOT_TRAINED if spec.draft_vocab_size is not None else NOT_TRAINED | {"d2t"}
    files = TensorFiles(path)
    return fill_drafter(spec, {name: files.read(name) for name in files.facts if name not in left_out}, path)


def fill_drafter(spec: DrafterSpec, tensors: dict[str, torch.Tensor], place: Path) -> Drafter:
    """A float32 drafter of these very tensors. Raises InputError when one is missing, left over or of another shape."""
    with torch.device("meta"):
        drafter = Drafter(spec)
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != found:
        odd = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
        odd += [f"unknown {name}" for name in sorted(found.keys() - expected.keys())]
        both = sorted(expected.keys() & found.keys())
        odd += [f"{name} is {list(found[name])}, not {list(expected[name])}" for name in both if expected[name] != found[name]]
        problem, fix = "the tensors are not those of the drafter that the config describes", "`dflash export --check` says more of an exported folder"
        raise InputError(problem, place=str(place), found="; ".join(odd[:6]), expected=f"{len(expected)} tensors", fix=fix)
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    odd = [
        f"{name} {kinds[name]}"
        for name, tensor in drafter.state_dict().items()
        if kinds[name] not in (FLOATS if tensor.is_floating_point() else WHOLE)
    ]
    if odd:
        problem, fix = (
            "holds tensors that are no plain numbers, such as quantised ones, which are not read here",
            "give the drafter before it was quantised",
        )
        raise InputError(problem, place=str(place), found="; ".join(odd[:6]), expected=f"weights of {', '.join(FLOATS)}", fix=fix)
    if "d2t" in tensors:
        ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
        if int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size or len(ids.unique()) < len(ids):
            range_found, wanted = f"row + d2t from {int(ids.min())} to {int(ids.max())}", f"{len(ids)} different of 0 to {spec.vocab_size - 1}"
            raise InputError("d2t is no mapping into the vocabulary", place=str(place), found=range_found, expected=wanted)
    drafter.load_state_dict({name: cast_floats(tensor, torch.float32) for name, tensor in tensors.items()}, strict=True, assign=True)
    return drafter


def cast_floats(tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """`tensor` as `kind`; whole numbers (`d2t`) as they are."""
    return tensor.to(kind) if tensor.is_floating_point() else tensor


def read_config(path: Path) -> dict[str, Any]:
    """A folder's config.json. Raises InputError."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot be read: {error}", place=str(path)) from None
    if not isinstance(config, dict):
        raise InputError("must be a JSON object", place=str(path), found=type(config).__name__)
    return config
