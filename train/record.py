"""run.json: everything that a run can be repeated from, and what a resumed run must find unchanged.

In: a resolved plan. Out: the document, written once; each later life of the run adds an entry to `lives`, and is refused when
it differs in a setting that decides what is learned, or in its data. Reads the machine and git; never fails because of them.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from .. import __version__
from ..common import atomic
from ..common.errors import InputError
from ..common.fingerprint import differences
from ..common.spec import read_json
from .resolve import RunPlan

RUN_JSON = "run.json"
MAY_CHANGE = {
    "distributed": {"mode", "timeout_seconds"},
    "run": {"device", "keep", "checkpoint_every", "trackers", "log_samples", "teacher_cache_bytes", "store_targets", "activation_checkpointing"},
}
"""Settings that decide where and how a run goes on, and nothing of what it learns."""
GIT_SECONDS = 10


def new_record(plan: RunPlan, compute: str, processes: int, total_steps: int, teacher: dict[str, Any] | None = None) -> dict[str, Any]:
    """The document of a run that starts now. teacher: where its labels come from."""
    return {
        "config": plan.config.model_dump(mode="json"),
        "drafter": plan.drafter.model_dump(mode="json"),
        "mask_token": {"id": plan.mask_token.id, "reason": plan.mask_token.reason},
        "caches": plan.caches(),
        "cache_paths": [str(reader.path.resolve()) for reader in plan.readers],
        "eval_caches": plan.eval_caches(),
        "eval_cache_paths": [str(reader.path.resolve()) for reader in plan.held_readers],
        "target": plan.readers[0].spec.provenance.model,
        "total_steps": total_steps,
        "lives": [life(compute, processes, 0, teacher)],
    }


def life(compute: str, processes: int, step: int, teacher: dict[str, Any] | None = None) -> dict[str, Any]:
    """What is true of one start, whether the first or a later one."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors", "numpy", "zarr")}
    return {
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "from_step": step,
        "compute": compute,
        "processes": processes,
        "teacher": teacher,
        "versions": {"dflash-cache": __version__, "python": platform.python_version(), **packages},
        "git": git_state(Path.cwd()),
        "command": [str(word) for word in sys.argv],
        "machine": platform.node(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the working folder, and whether it holds changes; None where there is no repository or no git."""

    def ask(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
        return done.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


def check_same_run(out: Path, plan: RunPlan) -> None:
    """Raise InputError, naming each difference, when `plan` is not the run in `out`."""
    recorded = read_json(out / RUN_JSON)
    ours = {
        "config": plan.config.model_dump(mode="json"),
        "drafter": plan.drafter.model_dump(mode="json"),
        "caches": plan.caches(),
        "eval_caches": plan.eval_caches(),
    }
    for part, what in (("config", "settings"), ("drafter", "drafter sizes"), ("caches", "data"), ("eval_caches", "held-out data")):
        found = list(differences(_comparable(part, recorded.get(part)), _comparable(part, ours[part])))
        if found:
            lines = "".join(f"\n  - {field}: the run has {have!r}, this command has {want!r}" for field, have, want in found)
            fix = "resume with the same, or start a new run in another folder"
            raise InputError(f"the run was started with other {what}:{lines}", place=f"--out {out}", fix=fix)


def add_life(out: Path, compute: str, processes: int, step: int, teacher: dict[str, Any] | None = None) -> list[str]:
    """Write down another start of the run in `out`. Returns, for people, in what it differs from the first."""
    record = read_json(out / RUN_JSON)
    now, first = life(compute, processes, step, teacher), record["lives"][0]
    atomic.write_json(out / RUN_JSON, {**record, "lives": [*record["lives"], now]})
    lines = []
    for name, what in (("compute", "computed on"), ("versions", "used")):
        for field, had, has in differences(first[name], now[name]):
            lines.append(f"note      the run {what} {field + ' ' if field else ''}{had}, and now {has}: numbers may differ in their last bits")
    if first["processes"] != processes:
        lines.append(f"note      {first['processes']} processes started the run, {processes} go on; steps and samples stay the same")
    return lines


def _comparable(part: str, document: Any) -> Any:
    """Without what may change; a list as a dict, so that `differences` names the entry."""
    if part == "config" and isinstance(document, dict):
        return {name: {k: v for k, v in fields.items() if k not in MAY_CHANGE.get(name, ())} for name, fields in document.items()}
    return {f"cache {number}": item for number, item in enumerate(document)} if isinstance(document, list) else document
