"""Export: a drafter's weights as one folder that vLLM (method dflash), SGLang (DFLASH) and the reference implementation load.

In: a run folder, a checkpoint or an exported folder. Out: config.json, model.safetensors and a README.md with the commands to
serve it; or, read back, a Drafter. Owns the names of the format; sources: the loaders of vLLM 0.32 and SGLang, `dflash` 0.1.0.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .. import __version__
from ..common import atomic
from ..common.errors import DflashError, InputError, guard_writing
from . import checkpoint
from .drafter import Drafter
from .drafter_spec import DrafterSpec
from .serving_config import drafter_from_config, serving_config, serving_readme

ExportType = Literal["bfloat16", "float16", "float32"]
CONFIG, MODEL, README = "config.json", "model.safetensors", "README.md"


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    folder: Path
    drafter: DrafterSpec
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        drafter, drafts = self.drafter.model_dump(mode="json"), self.drafter.block_size - 1
        return {"folder": str(self.folder), "dtype": self.dtype, "num_speculative_tokens": drafts, "drafter": drafter}

    def to_text(self) -> str:
        """For people."""
        drafts = self.drafter.block_size - 1
        return f"wrote {self.folder} ({self.dtype}); serve with {drafts} speculative tokens, see {self.folder / README}"


def export(source: Path, to: Path, dtype: ExportType = "bfloat16") -> ExportResult:
    """Write the drafter at `source` (run folder, checkpoint or export) to the folder `to`, and read it back to compare.

    The folder appears under its name only when complete. Raises InputError when `to` holds something already or `source`
    holds no drafter, DflashError when weights are not finite or what was written does not read back equal.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError("holds something already", place=f"--to {to}", expected="a new or empty folder", fix="choose another folder")
    drafter = load_drafter(source)
    check_servable(drafter.spec, source)
    kind = getattr(torch, dtype)
    tensors = {name: _floats(tensor.detach(), kind).contiguous() for name, tensor in drafter.state_dict().items()}
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise DflashError("weights are not finite; such a drafter is not exported", place=str(source), found=", ".join(broken[:5]))
    with guard_writing(to):
        _write(drafter, tensors, to, dtype)
    return ExportResult(to, drafter.spec, dtype)


def check_servable(spec: DrafterSpec, place: Path) -> None:
    """Raise InputError for a drafter that the z-lab format cannot describe."""
    odd = f"a draft vocabulary of {spec.draft_vocab_size} tokens" if spec.draft_vocab_size is not None else ""
    odd = odd or ("drafting from the anchor (sample_from_anchor)" if spec.sample_from_anchor else "")
    if odd:
        fix = "use the speculators format, or train without it; `dflash eval --cache` measures it as it is"
        raise InputError(f"the z-lab format has no words for {odd}", place=str(place), expected="the speculators format", fix=fix)


def _floats(tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """`tensor` as `kind`; whole numbers (`d2t`) as they are."""
    return tensor.to(kind) if tensor.is_floating_point() else tensor


def _write(drafter: Drafter, tensors: dict[str, torch.Tensor], to: Path, dtype: ExportType) -> None:
    """Write beside `to`, read back, compare, rename."""
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f".{to.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        (partial / CONFIG).write_text(json.dumps(serving_config(drafter.spec, dtype), indent=2) + "\n")
        save_file(tensors, partial / MODEL, metadata={"format": "pt", "dflash-cache": __version__})
        (partial / README).write_text(serving_readme(drafter.spec, dtype))
        _compare(load_drafter(partial), tensors, drafter.spec)
        if to.is_dir():
            to.rmdir()
        atomic.publish_folder(partial, to)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_drafter(path: Path) -> Drafter:
    """The drafter in a run folder (its newest checkpoint), a checkpoint or an exported folder; float32, on the CPU.

    Raises InputError when there is none, when tensors are missing, left over or of another shape, or when the config says
    two different things.
    """
    if (path / checkpoint.CHECKPOINTS).is_dir():
        path = checkpoint.newest(path)
    if (path / checkpoint.STATE).is_file():
        state = checkpoint.load_state(path)
        return fill_drafter(state.drafter, checkpoint.load_tensors(path, state, checkpoint.served_weights(state)), path)
    if not (path / CONFIG).is_file():
        raise InputError("holds no drafter", place=str(path), expected="a run folder, a checkpoint or an exported folder", fix="check the path")
    spec = drafter_from_config(read_config(path / CONFIG), str(path / CONFIG))
    try:
        tensors = load_file(path / MODEL)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot be read: {error}", place=str(path / MODEL)) from None
    return fill_drafter(spec, tensors, path)


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
        problem = "the tensors are not those of the drafter that the config describes"
        raise InputError(problem, place=str(place), found="; ".join(odd[:6]), expected=f"{len(expected)} tensors")
    drafter.load_state_dict({name: _floats(tensor, torch.float32) for name, tensor in tensors.items()}, strict=True, assign=True)
    return drafter


def read_config(path: Path) -> dict[str, Any]:
    """A folder's config.json. Raises InputError."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", place=str(path)) from None
    if not isinstance(config, dict):
        raise InputError("must be a JSON object", place=str(path), found=type(config).__name__)
    return config


def _compare(written: Drafter, tensors: dict[str, torch.Tensor], spec: DrafterSpec) -> None:
    if written.spec != spec or not all(torch.equal(tensor, _floats(tensors[name], torch.float32)) for name, tensor in written.state_dict().items()):
        raise DflashError("what was written does not read back equal; the folder was not published", place="export")
