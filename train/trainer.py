"""The training loop: rows, gradients, one division, a step; logs, evaluations and checkpoints.

In: a loader of rows, drafter, head, settings and where to start. Out: checkpoints, logs and a summary. All gradients are sums
over slots; they are divided once, by the sum of weights of all rows of the step on all processes, so that an update does not
depend on how samples were split into rows or shared among processes. What a step draws depends on (seed, step, row) alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..common.errors import RunFailed, guard_writing
from ..common.progress import ProgressBar
from . import checkpoint
from .activation import recompute_in_backward
from .checkpoint import CheckpointState
from .config import TrainConfig
from .device import Compute
from .dist import Processes, gathered, placed, replicate, shard, sharing
from .draft_head import draft_head
from .drafter import Drafter
from .drafter_spec import DrafterSpec
from .ema import WeightMean
from .idle import idle_loss
from .log import RunLog, Window, last_means
from .loss import LossSums
from .optim import apply_gradients, build_optimizer, optimizer_tensors, restore_optimizer
from .schedule import lr_at
from .step import StepSeeds, row_loss
from .summary import TrainSummary
from .target_head import TargetHead
from .teacher import TeacherCache
from .work import Position, Rows, StepWork, total_steps, work

RECOMPILE_LIMIT = 32
"""Of one function: a layer for each number of blocks (`step.SHAPE_BUCKETS`) and each kind of mask, and some to spare."""
Samples = tuple[tuple[int, int], ...]
Evaluate = Callable[[DrafterSpec, dict[str, torch.Tensor]], dict[str, Any]]
"""A drafter's weights judged on held-out samples: `holdout.HeldOut`."""


@dataclass(frozen=True)
class StepSums:
    """What a step adds up to, over all processes."""

    loss: LossSums
    tokens: torch.Tensor
    """int64."""


class Trainer:
    """One run. `train` takes it from where it stands to its last step."""

    def __init__(
        self,
        config: TrainConfig,
        rows: Rows,
        drafter: Drafter,
        head: TargetHead,
        compute: Compute,
        run: Path,
        processes: Processes | None = None,
        evaluate: Evaluate | None = None,
    ) -> None:
        self.config, self.rows, self.head, self.compute, self.run = config, rows, head, compute, run
        self.processes, self.evaluate = processes or Processes(device=compute.device), evaluate
        self.drafter = drafter.to(compute.device).train()
        if config.run.activation_checkpointing:
            recompute_in_backward(self.drafter.layers)
        if config.run.float8:
            self.drafter.multiply_in_float8()
        if compute.compiles(config.run.compile):
            self.drafter.compile_layers()
        shard(self.drafter, self.drafter.layers, compute, self.processes)
        self.parameters = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.drafter, config.optim)
        self.mean = WeightMean(self.drafter, config.optim.ema_decay) if config.optim.ema_decay is not None else None
        self.teacher = TeacherCache(config.run.teacher_cache_bytes)
        self.draft_head = draft_head(head.head, self.drafter.d2t)
        if config.run.float8:
            self.draft_head = replace(self.draft_head, head=self.draft_head.head.with_float8_gradients())
        self.total_steps = total_steps(config.optim, rows)
        self.state = CheckpointState(step=0, epoch=0, row=0, processes=self.processes.size, config=config, drafter=self.drafter.spec)
        self._nonfinite: list[tuple[int, Samples]] = []
        if compute.attention == "flex":
            import torch._dynamo

            torch._dynamo.config.fail_on_recompile_limit_hit = True  # instead of a silent, slow, dense fallback
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        self._forward: Any = replicate(self.drafter, self.processes)

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.state.step

    @property
    def position(self) -> Position:
        """The next row to read."""
        return Position(self.state.epoch, self.state.row)

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint, whatever the number of processes that wrote it: weights, moments, counters, place in the data."""
        state = checkpoint.load_state(folder)
        weights = checkpoint.load_tensors(folder, state, checkpoint.MODEL)
        own = self.drafter.state_dict()
        self.drafter.load_state_dict({name: placed(tensor, own.get(name, tensor)) for name, tensor in weights.items()}, strict=True)
        restore_optimizer(self.drafter, self.optimizer, checkpoint.load_tensors(folder, state, checkpoint.OPTIMIZER), str(folder))
        if self.mean is not None:
            names = self.mean.tensors.keys()
            means = checkpoint.load_tensors(folder, state, checkpoint.EMA)
            self.mean.restore({name: tensor for name, tensor in means.items() if name in names}, str(folder))
        self.state = state.model_copy(update={"files": {}, "digest": "", "processes": self.processes.size})
        if self.processes.first:
            checkpoint.mark_best(self.run, self.state)  # the last life may have ended before it could

    def train(self, stop_after: int | None = None) -> TrainSummary:
        """Take steps until the last (or until step `stop_after`, as if interrupted there right after a checkpoint).

        Raises RunFailed after `max_nonfinite_steps` steps in a row that were not finite.
        """
        started, last = time.monotonic(), min(self.total_steps, stop_after or self.total_steps)
        config, window, shown = self.config.run, Window(), Window()
        saved: Path | None = None
        steps = work(self.rows, self.position, self.config.optim, self.processes.rank, self.processes.size)
        with self._bar() as bar, self._log() as log:
            while self.step < last and not self._stalls():
                lr = lr_at(self.step, self.total_steps, self.config.optim)
                done, samples = self._one_step(next(steps), lr)
                window = window + done
                if log is not None and samples:
                    log.write_samples(self.step, samples)
                is_best = self._evaluate(log)
                ends = self.step == last or self._stalls()
                if ends or self.step % config.log_every == 0:
                    if log is not None:
                        log.write(self.step, self.state.epoch, lr, window)
                    shown, window = window, Window()
                if ends or is_best or self.step % config.checkpoint_every == 0:
                    saved = self.save()
                if bar is not None:
                    bar.update(1, (window if window.sums is not None else shown).note())
        loss, accuracy, tau = shown.means() if shown.sums is not None else last_means(self.run)
        state = self.state
        return TrainSummary(
            steps=state.step,
            skipped_steps=state.skipped_steps,
            tokens=state.tokens,
            loss=loss,
            accuracy=accuracy,
            tau=tau,
            seconds=time.monotonic() - started,
            checkpoint=saved or checkpoint.newest(self.run),
            best_step=state.best_step,
            best_tau=state.best_tau,
            stopped_early=self._stalls(),
        )

    def save(self) -> Path:
        """Publish a checkpoint of now; written by the first process, a success or a failure of all."""
        own = self.drafter.state_dict()
        model, optimizer = gathered(own, self.processes), gathered(optimizer_tensors(self.drafter, self.optimizer), self.processes)
        ema = gathered({**own, **self.mean.tensors}, self.processes) if self.mean is not None else None

        def write() -> Path:
            with guard_writing(self.run):
                folder = checkpoint.save(self.run, self.state, model, optimizer, self.config.run.keep, ema)
                checkpoint.mark_best(self.run, self.state)
            return folder

        return self.processes.first_does(write)

    def _one_step(self, step: StepWork, lr: float) -> tuple[Window, Samples]:
        """Returns what it adds to the log, and its samples where they are logged."""
        started = time.monotonic()
        sums, tokens = LossSums.none(self.drafter.spec.num_drafted, self.compute.device), 0
        samples: list[tuple[int, Samples]] = []
        passes = -(-step.rows // self.processes.size)
        for number in range(passes):
            place, batch = next(step.mine, (None, None))
            with sharing(self._forward, last=number == passes - 1):
                loss = None
                if place is not None and batch is not None:
                    row = self._row_loss(place, batch)
                    loss, sums, tokens = row.loss, sums + row.sums, tokens + batch.num_tokens
                    samples.append((place, batch.sample_ids))
                if loss is None and self.processes.size > 1:
                    loss = idle_loss(self._forward, self.drafter.spec, self.head, self.config.loss, self.compute, self.config.data.row_tokens)
                if loss is not None:
                    loss.backward()
        whole = self.processes.sum(StepSums(sums, torch.tensor(tokens)))
        # the mean over the processes has been taken already: what is missing of the division is weight / size
        weight, finite = whole.loss.weight_sum / self.processes.size, whole.loss.loss_sum.isfinite()
        norm = apply_gradients(self.parameters, self.optimizer, weight, lr, self.config.optim.clip_norm, finite)
        changed = norm is not None
        self.state = self.state.model_copy(
            update={
                "step": self.step + 1,
                "epoch": step.after.epoch,
                "row": step.after.row,
                "tokens": self.state.tokens + int(whole.tokens),
                "skipped_steps": self.state.skipped_steps + (not changed),
            }
        )
        if changed and self.mean is not None:
            self.mean.update(self.step - self.state.skipped_steps)
        broken = not changed and bool(weight != 0)
        everyone = self._of_all(samples) if broken or self.config.run.log_samples else ()
        self._judge(changed, broken, everyone)
        window = Window(whole.loss if changed else None, int(whole.tokens), time.monotonic() - started, 1, 0 if changed else 1, norm or 0.0)
        return window, everyone if self.config.run.log_samples else ()

    def _row_loss(self, place: int, batch: Any) -> Any:
        seeds = StepSeeds.at(self.config.run.seed, self.step, place, 0, self.compute.device)
        spec, loss = self.drafter.spec, self.config.loss
        return row_loss(self._forward, spec, self.head, batch, loss, self.compute, seeds, self.teacher, self.draft_head)

    def _of_all(self, samples: list[tuple[int, Samples]]) -> Samples:
        """Samples of a step over all processes, row by row."""
        rows = sorted(row for part in self.processes.gather(samples) for row in part)
        return tuple(sample for _, ids in rows for sample in ids)

    def _judge(self, changed: bool, broken: bool, samples: Samples) -> None:
        if changed:
            self._nonfinite.clear()
        if not broken:
            return
        self._nonfinite.append((self.step, samples))
        if len(self._nonfinite) >= self.config.run.max_nonfinite_steps:
            where = "; ".join(f"step {step}: " + ", ".join(f"cache {c} sample {s}" for c, s in ids[:8]) for step, ids in self._nonfinite[-3:])
            raise RunFailed(
                f"loss or gradient was not finite in {len(self._nonfinite)} steps in a row; no weight was changed by them",
                place=f"step {self.step}",
                found=where,
                fix="run `dflash verify` on the cache; if it is sound, lower optim.lr or raise optim.warmup_ratio",
            )

    def _evaluate(self, log: RunLog | None) -> bool:
        """Evaluate when it is time. True when no evaluation so far gave a better tau."""
        if self.evaluate is None or not (self.step % self.config.eval.every == 0 or self.step == self.total_steps):
            return False
        weights = {**self.drafter.state_dict(), **(self.mean.tensors if self.mean is not None else {})}
        numbers = self.evaluate(self.drafter.spec, weights)
        if log is not None:
            log.write_evaluation(self.step, numbers)
        is_best = numbers["finite"] and (self.state.best_tau is None or numbers["tau"] > self.state.best_tau)
        best = {"best_step": self.step, "best_tau": numbers["tau"], "evaluations_since_best": 0}
        worse = {"evaluations_since_best": self.state.evaluations_since_best + 1}
        self.state = self.state.model_copy(update=best if is_best else worse)
        return bool(is_best)

    def _stalls(self) -> bool:
        """Evaluations have not become better for so long that the run ends."""
        patience = self.config.eval.patience
        return self.evaluate is not None and patience is not None and self.state.evaluations_since_best >= patience

    def _bar(self) -> AbstractContextManager[ProgressBar | None]:
        return ProgressBar("train", self.total_steps, self.step) if self.processes.first else nullcontext()

    def _log(self) -> AbstractContextManager[RunLog | None]:
        return RunLog(self.run, self.step, self.config) if self.processes.first else nullcontext()
