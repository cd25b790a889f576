"""What a run writes down as it goes: metrics.jsonl, eval.jsonl, samples.jsonl, trackers, and the note beside the progress bar.

In: what steps add up to. Out: one line for each `log_every` steps, over exactly these steps, and one for each evaluation. On
resume, lines of steps that will be taken again are dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..common import atomic
from .config import TrainConfig
from .loss import LossSums
from .metrics import quality
from .trackers import Trackers

METRICS, EVALUATIONS, SAMPLES = "metrics.jsonl", "eval.jsonl", "samples.jsonl"
TRACKED = ("loss", "lr", "grad_norm", "accuracy", "streak", "tau", "tau_full", "tokens_per_second")


@dataclass(frozen=True)
class Window:
    """Some consecutive steps. Add with +."""

    sums: LossSums | None = None
    """Of steps that changed weights; None when there were none."""
    tokens: int = 0
    """Read, padding aside."""
    seconds: float = 0.0
    """Taken."""
    steps: int = 0
    """Steps."""
    skipped: int = 0
    """Of them, steps that changed nothing."""
    norm_sum: float = 0.0
    """Gradient norms before clipping, summed over steps that changed weights."""

    def __add__(self, other: Window) -> Window:
        sums = self.sums + other.sums if self.sums is not None and other.sums is not None else self.sums or other.sums
        numbers = (getattr(self, name) + getattr(other, name) for name in ("tokens", "seconds", "steps", "skipped", "norm_sum"))
        return Window(sums, *numbers)

    def means(self) -> tuple[float, float, float]:
        """(loss, accuracy, tau); nothing learned yet reads 0, 0, 1."""
        if self.sums is None:
            return 0.0, 0.0, 1.0
        drafts = quality(self.sums.counts)
        return self.sums.mean, drafts.accuracy, drafts.tau

    def note(self) -> str:
        """For the progress bar."""
        loss, accuracy, tau = self.means()
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return f"loss {loss:.3f}  accuracy {accuracy:.1%}  tau {tau:.2f}  {rate:,.0f} tok/s"


class JsonLines:
    """A file of one JSON object a line. Lines after step `step`, and what an interrupted write left, are dropped first."""

    def __init__(self, path: Path, step: int) -> None:
        if path.is_file():
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            if len(kept) != len(lines):
                atomic.write_bytes(path, "".join(kept).encode())
        self._file = open(path, "a")  # noqa: SIM115 - closed in close

    def append(self, line: dict[str, Any]) -> None:
        """One more line."""
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Make it durable."""
        os.fsync(self._file.fileno())
        self._file.close()


class RunLog:
    """Appends to a run's logs. `step` is where the run stands: what was logged after it is dropped first."""

    def __init__(self, run: Path, step: int, config: TrainConfig) -> None:
        self._metrics, self._evaluations = JsonLines(run / METRICS, step), JsonLines(run / EVALUATIONS, step)
        self._samples = JsonLines(run / SAMPLES, step) if config.run.log_samples else None
        self._trackers = Trackers(config.run.trackers, run, config.model_dump(mode="json"), step)

    def __enter__(self) -> RunLog:
        return self

    def write(self, step: int, epoch: int, lr: float, window: Window) -> None:
        """One line for the steps of `window`, which end with `step`; its loss is null when all of them were skipped."""
        if window.sums is None:
            self._metrics.append({"step": step, "epoch": epoch, "loss": None, "lr": lr, "tokens": window.tokens, "skipped_steps": window.skipped})
            return
        drafts = quality(window.sums.counts)
        line = {
            "step": step,
            "epoch": epoch,
            "loss": window.sums.mean,
            "lr": lr,
            "grad_norm": window.norm_sum / max(window.steps - window.skipped, 1),
            **drafts.to_dict(),
            "tokens": window.tokens,
            "seconds": round(window.seconds, 6),
            "tokens_per_second": round(window.tokens / window.seconds, 1) if window.seconds else 0.0,
            "skipped_steps": window.skipped,
        }
        self._metrics.append(line)
        slots = {f"accuracy_slot/{slot:02d}": value for slot, value in enumerate(drafts.accuracy_per_slot, 1)}
        self._trackers.log(step, {**{name: line[name] for name in TRACKED}, **slots})

    def write_evaluation(self, step: int, numbers: dict[str, Any]) -> None:
        """One line for an evaluation after `step`."""
        self._evaluations.append({"step": step, **numbers})
        slots = {f"eval/accuracy_slot/{slot:02d}": value for slot, value in enumerate(numbers["accuracy_per_slot"], 1)}
        sources = {f"eval/tau/{source}": found["tau"] for source, found in numbers["by_source"].items()}
        self._trackers.log(step, {**{f"eval/{name}": numbers[name] for name in ("tau", "tau_walk", "accuracy")}, **slots, **sources})

    def write_samples(self, step: int, samples: Sequence[tuple[int, int]]) -> None:
        """One line with the samples of a step, where the run asks for it."""
        if self._samples is not None:
            self._samples.append({"step": step, "samples": [list(sample) for sample in samples]})

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for file in (self._metrics, self._evaluations, self._samples):
            if file is not None:
                file.close()
        self._trackers.close()


def last_means(run: Path) -> tuple[float, float, float] | tuple[None, None, None]:
    """(loss, accuracy, tau) of the newest line in which anything was learned; Nones when there is none."""
    lines = (run / METRICS).read_text().splitlines() if (run / METRICS).is_file() else []
    for line in map(json.loads, reversed(lines)):
        if line["loss"] is not None:
            return line["loss"], line["accuracy"], line["tau"]
    return None, None, None
