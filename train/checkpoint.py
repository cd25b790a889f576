"""Checkpoints: a folder per kept step, published by rename, checked by digest, without pickle.

    RUN/checkpoints/step-00000500/
      model.safetensors       float32 weights under their serving names
      ema.safetensors         the running mean of the weights, where the run keeps one: what evaluation and export take
      optimizer.safetensors   the optimizer's moments
      state.json              step, position in the data, resolved configuration, drafter, digests of the files; last written
    RUN/checkpoints/best      a link to the step that drafts held-out samples best; that step is kept

In: tensors and a CheckpointState. Out: the same. Knows nothing of the loop that takes the steps.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..common import atomic
from ..common.config import Config
from ..common.errors import OUT_OF_SPACE, DflashError, InputError, disk_full
from ..common.fingerprint import canonical, digest_bytes, digest_file
from ..common.spec import read_json
from .config import TrainConfig
from .drafter_spec import DrafterSpec

CHECKPOINTS, BEST, STATE = "checkpoints", "best", "state.json"
MODEL, EMA, OPTIMIZER = "model.safetensors", "ema.safetensors", "optimizer.safetensors"
_NAME = re.compile(r"step-(\d{8})")
_DAMAGED_FIX = "delete this folder to go on from the checkpoint before it"


class FileDigest(Config):
    """A file of the checkpoint."""

    size: int
    """Bytes."""
    xxh3_128: str
    """Hex digest."""


class CheckpointState(Config):
    """All that is not a tensor."""

    format: int = 1
    """Of this layout."""
    step: int = Field(ge=0)
    """Optimizer steps taken."""
    epoch: int = Field(ge=0)
    """Epoch of the next row."""
    row: int = Field(ge=0)
    """Number of the next row in that epoch."""
    skipped_steps: int = Field(default=0, ge=0)
    """Steps so far that changed nothing: not finite, or without any anchor."""
    tokens: int = Field(default=0, ge=0)
    """Tokens read so far, padding aside."""
    processes: int = Field(default=1, ge=1)
    """That took the last step."""
    best_step: int | None = Field(default=None, ge=0)
    """The step that drafts held-out samples best; None before the first evaluation."""
    best_tau: float | None = None
    """Its tau."""
    evaluations_since_best: int = Field(default=0, ge=0)
    """Later evaluations, none of them better."""
    config: TrainConfig
    """As resolved at the start; gamma is in it."""
    drafter: DrafterSpec
    """What the weights mean."""
    files: dict[str, FileDigest] = Field(default_factory=dict)
    """model, optimizer and ema."""
    digest: str = ""
    """xxh3-128 of the canonical JSON of this document without this field."""


def save(
    run: Path,
    state: CheckpointState,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    keep: int,
    ema: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Publish a checkpoint under `run` and delete all but the `keep` newest and the best. Raises DiskFull; what was there stays.

    ema: like `model`, complete in itself.
    """
    folder = run / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    destination = folder / f"step-{state.step:08d}"
    partial = folder / f".partial-{destination.name}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        files = {}
        for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer), *([(EMA, ema)] if ema is not None else [])):
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, partial / name)
            size, digest = digest_file(partial / name)
            files[name] = FileDigest(size=size, xxh3_128=digest)
        document = state.model_copy(update={"files": files}).model_dump(mode="json", exclude={"digest"})
        atomic.write_json(partial / STATE, {**document, "digest": _digest(document)})
        shutil.rmtree(destination, ignore_errors=True)  # left by an earlier life of this run at the same step
        atomic.publish_folder(partial, destination)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
            raise disk_full(error, str(destination)) from None
        if isinstance(error, SafetensorError) and "os error 28" in str(error).lower():
            raise disk_full(OSError(28, os.strerror(28)), str(destination)) from None
        raise
    best = f"step-{state.best_step:08d}" if state.best_step is not None else None
    for old in list_checkpoints(run)[:-keep]:
        if old.name != best:
            shutil.rmtree(old)
    return destination


def mark_best(run: Path, state: CheckpointState) -> None:
    """Point `best` at the step that `state` names, where it is kept; in one rename."""
    folder = run / CHECKPOINTS
    name = f"step-{state.best_step or 0:08d}"
    if state.best_step is None or not (folder / name).is_dir():
        return
    link = folder / f".partial-{BEST}-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(name, target_is_directory=True)
    os.replace(link, folder / BEST)
    atomic.fsync_folder(folder)


def list_checkpoints(run: Path) -> list[Path]:
    """Published checkpoints of a run folder, oldest first."""
    folder = run / CHECKPOINTS
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def clear_partial(run: Path) -> None:
    """Delete what an interrupted `save` left."""
    for path in (run / CHECKPOINTS).glob(".partial-*"):
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


def newest(run: Path) -> Path:
    """The newest checkpoint of a run. Raises InputError when it has none."""
    found = list_checkpoints(run)
    if not found:
        raise InputError("has no checkpoint", place=str(run), expected=f"{CHECKPOINTS}/step-NNNNNNNN", fix="train first, or check the path")
    return found[-1]


def load_state(folder: Path) -> CheckpointState:
    """What a checkpoint says of itself, checked. Raises DflashError when it was changed or damaged."""
    document = read_json(folder / STATE, _DAMAGED_FIX)
    try:
        state = CheckpointState.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise DflashError(f"the checkpoint cannot be read: {first['loc']}: {first['msg']}", place=str(folder / STATE), fix=_DAMAGED_FIX) from None
    if state.digest != _digest({name: value for name, value in document.items() if name != "digest"}):
        raise DflashError("the checkpoint's digest does not match", place=str(folder / STATE), fix=_DAMAGED_FIX)
    return state


def load_tensors(folder: Path, state: CheckpointState, name: str) -> dict[str, torch.Tensor]:
    """The tensors of MODEL, OPTIMIZER or EMA, after checking the file's size and digest. Raises DflashError otherwise."""
    path = folder / name
    recorded = state.files.get(name)
    try:
        found = digest_file(path)
    except OSError as error:
        raise DflashError(f"cannot be read: {error.strerror}", place=str(path), fix=_DAMAGED_FIX) from None
    if recorded is None or found != (recorded.size, recorded.xxh3_128):
        raise DflashError("is not what was written", place=str(path), found=f"{found[0]} bytes, {found[1]}", expected=str(recorded), fix=_DAMAGED_FIX)
    tensors: dict[str, Any] = load_file(path)
    return tensors


def served_weights(state: CheckpointState) -> str:
    """The file that evaluation and export take: EMA where there is one."""
    return EMA if EMA in state.files else MODEL


def _digest(document: Mapping[str, Any]) -> str:
    return digest_bytes(canonical(document))
