"""The training loop: rows, gradients, one division, a step; logs and checkpoints.

In: a loader of rows, drafter, head, optimizer settings and where to start. Out: checkpoints, metrics.jsonl and a summary.
All gradients are sums over slots; they are divided once, by the sum of weights of all rows of the step, so that an update
does not depend on how samples were split into rows. What a step draws depends on (seed, step, row, rank) alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..common.errors import RunFailed, guard_writing
from ..common.progress import ProgressBar
from . import checkpoint
from .batch import Batch
from .checkpoint import CheckpointState
from .config import TrainConfig
from .device import Compute
from .drafter import Drafter
from .log import MetricsLog, Window, last_means
from .loss import LossSums
from .optim import build_optimizer, optimizer_tensors, restore_optimizer, set_lr
from .schedule import lr_at
from .step import StepSeeds, row_loss
from .target_head import TargetHead
from .teacher import TeacherCache


class Rows(Protocol):
    """What the loop needs of a loader."""

    def rows_per_epoch(self, epoch: int) -> int: ...

    def epoch(self, epoch: int, start_row: int = 0) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class TrainSummary:
    """How a run ended."""

    steps: int
    """Optimizer steps taken in all, earlier lives of the run included."""
    skipped_steps: int
    """Of them, steps that changed no weight: not finite, or without any anchor."""
    tokens: int
    """Tokens read, padding aside."""
    loss: float | None
    """Mean over the last log window in which anything was learned; None when there was none."""
    accuracy: float | None
    """The same."""
    tau: float | None
    """The same: mean leading right slots + 1."""
    seconds: float
    """Of this call."""
    checkpoint: Path
    """The last one."""

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "checkpoint": str(self.checkpoint)}

    def to_text(self) -> str:
        """For people."""
        skipped = f", {self.skipped_steps} of them skipped" if self.skipped_steps else ""
        learned = self.loss is not None and self.accuracy is not None and self.tau is not None
        measured = f"loss {self.loss:.4f}, accuracy {self.accuracy:.1%}, tau {self.tau:.3f} at the end" if learned else "nothing was learned"
        return f"{self.steps:,} steps{skipped}, {self.tokens:,} tokens in {self.seconds:.0f} s; {measured}\n{self.checkpoint}"


@dataclass(frozen=True)
class Position:
    """The next row to read."""

    epoch: int = 0
    row: int = 0


def total_steps(config: TrainConfig, rows: Rows) -> int:
    """Optimizer steps of the run: as configured, or what `epochs` gives; a last group of rows may be smaller."""
    if config.optim.steps is not None:
        return config.optim.steps
    whole = math.floor(config.optim.epochs)
    count = sum(rows.rows_per_epoch(epoch) for epoch in range(whole))
    if config.optim.epochs > whole:
        count += math.ceil((config.optim.epochs - whole) * rows.rows_per_epoch(whole))
    return max(-(-count // config.optim.accumulate_rows), 1)


def row_stream(rows: Rows, start: Position) -> Iterator[tuple[Batch, Position]]:
    """Rows from `start` on, epoch after epoch without end, each with the position after it. Raises RunFailed when there are none."""
    epoch, row = start.epoch, start.row
    while True:
        before = (epoch, row)
        for batch in rows.epoch(epoch, row):
            row += 1
            yield batch, Position(epoch, row)
        if before == (epoch, 0) and row == 0:
            raise RunFailed("the caches give no rows", place=f"epoch {epoch}")
        epoch, row = epoch + 1, 0


class Trainer:
    """One run. `train` takes it from where it stands to its last step."""

    def __init__(self, config: TrainConfig, rows: Rows, drafter: Drafter, head: TargetHead, compute: Compute, run: Path, rank: int = 0) -> None:
        self.config, self.rows, self.head, self.compute, self.run, self.rank = config, rows, head, compute, run, rank
        self.drafter = drafter.to(compute.device).train()
        self.parameters = list(self.drafter.parameters())
        self.optimizer = build_optimizer(self.drafter, config.optim)
        self.teacher = TeacherCache(config.run.teacher_cache_bytes)
        self.total_steps = total_steps(config, rows)
        self.step, self.skipped, self.tokens, self.position = 0, 0, 0, Position()
        self._nonfinite: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        if compute.attention == "flex":
            import torch._dynamo

            torch._dynamo.config.fail_on_recompile_limit_hit = True  # instead of a silent, slow, dense fallback
        self._forward: Any = _compiled(self.drafter, compute) if config.run.compile else self.drafter

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint: weights, moments, counters and the place in the data."""
        state = checkpoint.load_state(folder)
        self.drafter.load_state_dict(checkpoint.load_tensors(folder, state, checkpoint.MODEL), strict=True)
        restore_optimizer(self.drafter, self.optimizer, checkpoint.load_tensors(folder, state, checkpoint.OPTIMIZER), str(folder))
        self.step, self.skipped, self.tokens = state.step, state.skipped_steps, state.tokens
        self.position = Position(state.epoch, state.row)

    def train(self, stop_after: int | None = None) -> TrainSummary:
        """Take steps until the last (or until step `stop_after`, as if interrupted there right after a checkpoint).

        Raises RunFailed after `max_nonfinite_steps` steps in a row that were not finite.
        """
        started, last = time.monotonic(), min(self.total_steps, stop_after or self.total_steps)
        config, window, shown = self.config.run, Window(), Window()
        stream = row_stream(self.rows, self.position)
        saved = None
        with ProgressBar("train", self.total_steps, self.step) as bar, MetricsLog(self.run, self.step, config.tensorboard) as log:
            while self.step < last:
                lr = lr_at(self.step, self.total_steps, self.config.optim)
                window = window + self._one_step(stream, lr)
                if self.step % config.log_every == 0 or self.step == last:
                    log.write(self.step, self.position.epoch, lr, window)
                    shown, window = window, Window()
                if self.step % config.checkpoint_every == 0 or self.step == last:
                    saved = self.save()
                bar.update(1, (window if window.sums is not None else shown).note())
        saved = saved or checkpoint.newest(self.run)
        loss, accuracy, tau = shown.means() if shown.sums is not None else last_means(self.run)
        return TrainSummary(self.step, self.skipped, self.tokens, loss, accuracy, tau, time.monotonic() - started, saved)

    def save(self) -> Path:
        """Publish a checkpoint of now."""
        state = CheckpointState(
            step=self.step,
            epoch=self.position.epoch,
            row=self.position.row,
            skipped_steps=self.skipped,
            tokens=self.tokens,
            config=self.config,
            drafter=self.drafter.spec,
        )
        with guard_writing(self.run):
            return checkpoint.save(self.run, state, self.drafter.state_dict(), optimizer_tensors(self.drafter, self.optimizer), self.config.run.keep)

    def _one_step(self, stream: Iterator[tuple[Batch, Position]], lr: float) -> Window:
        started = time.monotonic()
        sums, tokens = LossSums.none(self.drafter.spec.block_size, self.compute.device), 0
        samples: list[tuple[int, int]] = []
        for number in range(self.config.optim.accumulate_rows):
            batch, self.position = next(stream)
            seeds = StepSeeds.at(self.config.run.seed, self.step, number, self.rank, self.compute.device)
            row = row_loss(self._forward, self.drafter.spec, self.head, batch, self.config.loss, self.compute, seeds, self.teacher)
            if row.loss is not None:
                row.loss.backward()  # type: ignore[no-untyped-call]
            sums, tokens = sums + row.sums, tokens + batch.num_tokens
            samples.extend(batch.sample_ids)
        weight, finite = float(sums.weight_sum), math.isfinite(float(sums.loss_sum))
        norm = apply_gradients(self.parameters, self.optimizer, weight, lr, self.config.optim.clip_norm, finite)
        self.step += 1
        self.tokens += tokens
        self._judge(norm, weight, tuple(samples))
        changed = norm is not None
        return Window(sums if changed else None, tokens, time.monotonic() - started, 1, 0 if changed else 1, norm or 0.0)

    def _judge(self, norm: float | None, weight: float, samples: tuple[tuple[int, int], ...]) -> None:
        if norm is not None:
            self._nonfinite.clear()
            return
        self.skipped += 1
        if weight == 0:
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


def apply_gradients(
    parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, weight: float, lr: float, clip_norm: float, finite: bool
) -> float | None:
    """Divide the summed gradients by `weight`, clip, step, and clear. Returns the norm before clipping.

    None: nothing was changed, because there was no weight or something was not finite.
    """
    norm = None
    if weight > 0 and finite:
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_div_(gradients, weight)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip_norm))
        if math.isfinite(norm):
            set_lr(optimizer, lr)
            optimizer.step()
        else:
            norm = None
    optimizer.zero_grad(set_to_none=True)
    return norm


def _compiled(drafter: Drafter, compute: Compute) -> Any:
    return torch.compile(drafter, dynamic=False if compute.attention == "flex" else None)
