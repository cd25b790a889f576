"""A training run: from a configuration and caches to a run folder.

    RUN/run.json          resolved configuration, drafter, caches' fingerprints; versions, git state, command of each start
    RUN/metrics.jsonl     RUN/eval.jsonl     RUN/samples.jsonl     RUN/tensorboard/     RUN/checkpoints/step-NNNNNNNN/

In: what `dflash train` was given. Out: a TrainSummary. Torch is imported only once the plan stands. Under torchrun every
process calls this alike; the first one writes and prints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..common import atomic
from ..common.errors import InputError, guard_writing
from ..common.spec import read_json
from .config import TrainConfig
from .launch import Launch, read_launch
from .record import RUN_JSON, add_life, check_same_run, new_record
from .resolve import RunPlan, make_plan

if TYPE_CHECKING:
    from .device import Compute
    from .dist import Processes
    from .summary import TrainSummary
    from .target_head import TargetHead
    from .teacher_source import TeacherSource
    from .trainer import Evaluate
    from .work import Rows


def run(config: TrainConfig, caches: Sequence[Path], out: Path, resume: bool = False, eval_caches: Sequence[Path] = ()) -> TrainSummary:
    """Train a drafter into `out`.

    Raises InputError when `out` holds something already (unless `resume`), or when a resumed run differs from its first
    start in a setting or in its data, naming it.
    """
    launch = read_launch()
    if launch.first:
        _check_out(out, resume)
    config = _with_rows(config, out if resume else None, launch)
    plan = make_plan(config, caches, eval_caches)
    if launch.first:
        if resume:
            check_same_run(out, plan)
        with guard_writing(out):  # before anything slow is loaded
            out.mkdir(parents=True, exist_ok=True)

    from .device import check_float8, resolve_compute
    from .dist import device_name, join

    compute = resolve_compute(device_name(launch, config.run.device), config.run.dtype, config.run.attention)
    if config.run.float8:
        check_float8(plan.drafter, config.data.row_tokens, compute)
    with join(launch, config.distributed, compute.device) as processes:
        return _train(plan, out, resume, compute, processes)


def _train(plan: RunPlan, out: Path, resume: bool, compute: Compute, processes: Processes) -> TrainSummary:
    import torch

    from . import checkpoint
    from .drafter_init import first_drafter
    from .seeds import derive_seed
    from .split import held_out
    from .target_head import TargetHead
    from .teacher_source import find_teacher
    from .trainer import Trainer

    config = plan.config
    _say(processes, *plan.summary(), f"computes  on {compute}{_others(config, processes)}")
    head = TargetHead(plan.readers[0].path, plan.readers[0].spec, compute.device, compute.dtype)
    generator = torch.Generator().manual_seed(derive_seed("weights", config.run.seed))
    fresh = not checkpoint.list_checkpoints(out)
    held = [held_out(reader, config.data.eval_fraction) for reader in plan.readers]
    drafter, lines = first_drafter(plan.drafter, config.init, plan.readers, head, generator, fresh, held)
    _say(processes, *lines)
    teacher = find_teacher(plan, head, processes)
    _say(processes, *teacher.lines)
    with _rows(plan, compute, teacher) as rows, _held_out(plan, head, compute, processes, teacher) as evaluate:
        trainer = Trainer(config, rows, drafter, head, compute, out, processes, evaluate)
        if processes.first:
            checkpoint.clear_partial(out)
        if not fresh:
            trainer.resume(checkpoint.newest(out))
        if processes.first and resume:
            _say(processes, *add_life(out, str(compute), processes.size, trainer.step, teacher.record))
        elif processes.first:
            atomic.write_json(out / RUN_JSON, new_record(plan, str(compute), processes.size, trainer.total_steps, teacher.record))
        return trainer.train()


@contextmanager
def _rows(plan: RunPlan, compute: Compute, teacher: TeacherSource) -> Iterator[Rows]:
    from .device_feed import fed
    from .loader import RowLoader
    from .page_locked import row_memory

    rows = RowLoader(
        plan.samples.readers,
        layer_ids=plan.drafter.target_layer_ids,
        row_tokens=plan.config.data.row_tokens,
        need_verifier=plan.config.loss.label != "data" and teacher.trained is None,
        teacher=teacher.trained,
        seed=plan.config.data.seed,
        numbers=plan.samples.numbers,
        chosen=plan.samples.chosen,
        lanes=plan.config.data.lanes or 1,
        allocate=row_memory(compute.device),
    )
    with fed(rows, compute.device) as ready:
        yield ready


@contextmanager
def _held_out(plan: RunPlan, head: TargetHead, compute: Compute, processes: Processes, teacher: TeacherSource) -> Iterator[Evaluate | None]:
    if not plan.held_readers:
        yield None
        return
    from .device_feed import fed
    from .holdout import HeldOut
    from .loader import RowLoader
    from .page_locked import row_memory

    rows = RowLoader(
        plan.held_readers,
        layer_ids=plan.drafter.target_layer_ids,
        row_tokens=plan.config.data.row_tokens,
        need_verifier=teacher.held is None,
        teacher=teacher.held,
        seed=0,
        shuffle=False,
        chosen=lambda _: plan.held,
        allocate=row_memory(compute.device),
    )
    with fed(rows, compute.device) as ready:
        yield HeldOut(ready, head, compute, plan.config.eval, processes)


def _with_rows(config: TrainConfig, recorded_in: Path | None, launch: Launch) -> TrainConfig:
    """`optim.accumulate_rows` and `data.lanes` resolved: as given, as the run's first start had them, or one for each process."""
    rows, lanes = config.optim.accumulate_rows, config.data.lanes
    recorded = read_json(recorded_in / RUN_JSON)["config"] if recorded_in is not None else None
    chosen = rows is None and config.optim.accumulate_tokens is None
    if chosen:
        rows = launch.size if recorded is None else recorded["optim"]["accumulate_rows"]
    if lanes is None:
        lanes = (launch.size if chosen else 1) if recorded is None else recorded["data"].get("lanes")
    optim, data = config.optim.model_copy(update={"accumulate_rows": rows}), config.data.model_copy(update={"lanes": lanes})
    return config.model_copy(update={"optim": optim, "data": data})


def _say(processes: Processes, *lines: str) -> None:
    if processes.first:
        for line in lines:
            print(line, file=sys.stderr)


def _others(config: TrainConfig, processes: Processes) -> str:
    """What there is to say of several processes."""
    if processes.size == 1:
        return ""
    rows = config.optim.accumulate_rows
    uneven = f"; {rows} rows a step do not go evenly into them, so some wait" if rows is not None and rows % processes.size else ""
    lanes = config.data.lanes or 1
    twice = f"; data.lanes={lanes}, so some chunks are decoded by several (--set data.lanes={processes.size})" if lanes % processes.size else ""
    return f", {processes.size} processes ({processes.mode}){uneven}{twice}"


def _check_out(out: Path, resume: bool) -> None:
    if out.exists() and not out.is_dir():
        raise InputError("is no folder", place=f"--out {out}")
    if resume:
        if not (out / RUN_JSON).is_file():
            raise InputError("there is no run to resume", place=f"--out {out}", expected=f"{RUN_JSON} in it", fix="leave --resume out to start one")
    elif out.exists() and any(out.iterdir()):
        fix = "choose another folder, or go on with --resume"
        raise InputError("holds something already", place=f"--out {out}", expected="a new or empty folder", fix=fix)
