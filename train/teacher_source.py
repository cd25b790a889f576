"""TeacherSource: where a run's teacher tokens come from: kept in its caches, or computed as they are needed.

In: a plan and the target's head. Out: what the loaders read, and words for people and for run.json. All processes decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .dist import Processes
from .reader import CacheReader
from .resolve import RunPlan
from .target_head import TargetHead
from .targets_pass import Coverage, cover, targets_of
from .teacher_targets import TeacherTargets


@dataclass(frozen=True)
class TeacherSource:
    """What is kept of the caches that a run reads."""

    trained: tuple[TeacherTargets, ...] | None
    """Of each cache that an epoch reads, in the plan's order; None: verifier states are read instead, or no teacher is asked."""
    held: tuple[TeacherTargets, ...] | None
    """Of each cache that samples are evaluated from; likewise."""
    lines: tuple[str, ...]
    """For people."""
    record: dict[str, Any]
    """For run.json."""


def find_teacher(plan: RunPlan, head: TargetHead, processes: Processes) -> TeacherSource:
    """Find the kept tokens of a run's caches; where the run stores targets, compute and keep what is missing first."""
    targets = {reader.path: targets_of(reader, head) for reader in (*plan.readers, *plan.held_readers)}

    def of(readers: Sequence[CacheReader]) -> list[TeacherTargets]:
        return list({reader.path: targets[reader.path] for reader in readers}.values())

    label = plan.config.loss.label
    found = Coverage(0, lacking=f"label {label}")
    if label == "teacher":
        why_not = "run.store_targets=false" if plan.config.run.store_targets is False else "the run does not read all of its data"
        found = cover(of(plan.samples.readers), head, processes, store=plan.stores_targets, why_not=why_not)
    trained = tuple(targets[reader.path] for reader in plan.samples.readers) if not found.lacking else None
    others = [one for one in of(plan.held_readers) if trained is None or one not in trained]
    held = plan.held_readers and (not others or not cover(others, head, processes, store=False).lacking)
    identity = targets[plan.readers[0].path].head
    record = {"label": label, "kept": trained is not None, "head": identity.fingerprint, "computed_parts": found.computed, "why_not": found.lacking}
    return TeacherSource(
        trained,
        tuple(targets[reader.path] for reader in plan.held_readers) if held else None,
        (_line(found, str(identity)),) if label == "teacher" else (),
        record,
    )


def _line(found: Coverage, head: str) -> str:
    if found.lacking:
        return f"teacher   computed from verifier states: {found.lacking}"
    now = f", {found.computed} of them computed now" if found.computed else ""
    again = f" ({found.replaced} had been damaged)" if found.replaced else ""
    return f"teacher   tokens kept beside all {found.parts} parts{now}{again} ({head}); verifier states are not read"
