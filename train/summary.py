"""TrainSummary: how a training run ended, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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
    best_step: int | None = None
    """The step that drafts held-out samples best; None without evaluations."""
    best_tau: float | None = None
    """Its tau."""
    stopped_early: bool = False
    """Evaluations did not get better any more."""

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "checkpoint": str(self.checkpoint)}

    def to_text(self) -> str:
        """For people."""
        skipped = f", {self.skipped_steps} of them skipped" if self.skipped_steps else ""
        learned = self.loss is not None and self.accuracy is not None and self.tau is not None
        measured = f"loss {self.loss:.4f}, accuracy {self.accuracy:.1%}, tau {self.tau:.3f} at the end" if learned else "nothing was learned"
        lines = [f"{self.steps:,} steps{skipped}, {self.tokens:,} tokens in {self.seconds:.0f} s; {measured}"]
        if self.best_step is not None:
            early = "; stopped early" if self.stopped_early else ""
            lines.append(f"held-out: best tau {self.best_tau:.3f} after step {self.best_step:,}{early}")
        return "\n".join([*lines, str(self.checkpoint)])
