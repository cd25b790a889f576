"""A training run: from a configuration and caches to a run folder.

    RUN/run.json          resolved configuration, drafter, caches' fingerprints, versions, machine type
    RUN/metrics.jsonl     RUN/tensorboard/     RUN/checkpoints/step-NNNNNNNN/

In: what `dflash train` was given. Out: a TrainSummary. Torch is imported only once the plan stands.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..common import atomic
from ..common.errors import InputError, guard_writing
from ..common.fingerprint import differences
from ..common.spec import read_json
from .config import TrainConfig
from .resolve import RunPlan, make_plan

if TYPE_CHECKING:
    from .trainer import TrainSummary

RUN_JSON = "run.json"


def run(config: TrainConfig, caches: Sequence[Path], out: Path, resume: bool = False) -> TrainSummary:
    """Train a drafter into `out`.

    Raises InputError when `out` holds something already (unless `resume`), or when a resumed run differs from its first
    start in a setting or in its data, naming it.
    """
    _check_out(out, resume)
    plan = make_plan(config, caches)
    if resume:
        _check_same_run(out, plan)
    with guard_writing(out):  # before anything slow is loaded
        out.mkdir(parents=True, exist_ok=True)

    import torch

    from . import checkpoint
    from .device import resolve_compute
    from .drafter import Drafter
    from .loader import RowLoader
    from .seeds import derive_seed
    from .target_head import TargetHead
    from .trainer import Trainer

    compute = resolve_compute(config.run.device, config.run.dtype, config.run.attention)
    for line in (*plan.summary(), f"computes  on {compute}"):
        print(line, file=sys.stderr)
    head = TargetHead(plan.readers[0].path, plan.readers[0].spec, compute.device, compute.dtype)
    drafter = Drafter(plan.drafter).initialize(torch.Generator().manual_seed(derive_seed("weights", config.run.seed)))
    rows = RowLoader(
        plan.readers,
        layer_ids=plan.drafter.target_layer_ids,
        row_tokens=config.data.row_tokens,
        need_verifier=config.loss.label != "data",
        seed=config.data.seed,
    )
    try:
        trainer = Trainer(config, rows, drafter, head, compute, out)
        if not resume:
            atomic.write_json(out / RUN_JSON, {**_record(plan), "compute": str(compute), "total_steps": trainer.total_steps})
        checkpoint.clear_partial(out)
        if checkpoint.list_checkpoints(out):
            trainer.resume(checkpoint.newest(out))
        return trainer.train()
    finally:
        rows.close()


def _record(plan: RunPlan) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors", "numpy", "zarr")}
    return {
        "config": plan.config.model_dump(mode="json"),
        "drafter": plan.drafter.model_dump(mode="json"),
        "mask_token": {"id": plan.mask_token.id, "reason": plan.mask_token.reason},
        "caches": plan.caches(),
        "cache_paths": [str(reader.path.resolve()) for reader in plan.readers],
        "target": plan.readers[0].spec.provenance.model,
        "versions": {"dflash-cache": __version__, "python": platform.python_version(), **versions},
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _check_out(out: Path, resume: bool) -> None:
    if out.exists() and not out.is_dir():
        raise InputError("is no folder", place=f"--out {out}")
    if resume:
        if not (out / RUN_JSON).is_file():
            raise InputError("there is no run to resume", place=f"--out {out}", expected=f"{RUN_JSON} in it", fix="leave --resume out to start one")
    elif out.exists() and any(out.iterdir()):
        fix = "choose another folder, or go on with --resume"
        raise InputError("holds something already", place=f"--out {out}", expected="a new or empty folder", fix=fix)


def _check_same_run(out: Path, plan: RunPlan) -> None:
    recorded, ours = read_json(out / RUN_JSON), _record(plan)
    for part, what in (("config", "settings"), ("drafter", "drafter sizes"), ("caches", "data")):
        found = list(differences(_named(recorded.get(part)), _named(ours[part])))
        if found:
            lines = "".join(f"\n  - {field}: the run has {have!r}, this command has {want!r}" for field, have, want in found)
            fix = "resume with the same, or start a new run in another folder"
            raise InputError(f"the run was started with other {what}:{lines}", place=f"--out {out}", fix=fix)


def _named(items: Any) -> Any:
    """A list as a dict, so that `differences` names the entry."""
    return {f"cache {number}": item for number, item in enumerate(items)} if isinstance(items, list) else items
