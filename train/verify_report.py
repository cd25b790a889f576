"""VerifyReport: what `dflash verify` found, as text and as JSON. Computes nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..common import layout
from ..common.errors import REPAIR, DflashError
from .targets import AGAIN


@dataclass(frozen=True)
class Problem:
    """Something that is not as it must be."""

    place: str
    """Part, array and chunk."""
    what: str
    entry: str = ""
    """The entry of the cache that is damaged, as a path in it: `parts/NAME`, `target`, ...; empty when no single one is."""


@dataclass
class VerifyReport:
    """The answer of `dflash verify`."""

    path: str
    parts: int = 0
    samples: int = 0
    tokens: int = 0
    chunks: int = 0
    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list)
    fidelity_exact: int = 0
    """Samples whose stored state gives the engine's own token."""
    fidelity_near_ties: int = 0
    """Samples that give a token within rounding of it."""
    fidelity_different: int = 0
    teacher_tokens: int = 0
    """Supervised tokens on which the teacher was compared with the data."""
    teacher_equals_data: int = 0
    targets: int = 0
    """Groups of teacher tokens kept beside the parts that are whole."""
    stale_targets: int = 0
    """Groups made of a part that is gone, was replaced or is damaged: never used, made anew by `dflash targets`."""

    def add(self, error: DflashError, entry: str) -> None:
        """List an error as a problem of `entry`; the way out of all of them is told once, at the end."""
        details = [("found", error.found), ("expected", error.expected)]
        lines = [error.problem, *(f"  {name + ':':9} {value}" for name, value in details if value not in (None, ""))]
        self.problems.append(Problem(error.place, "\n".join(lines), entry))

    @property
    def damaged(self) -> list[str]:
        """The entries of the cache that are damaged, each once, in the order found."""
        return list(dict.fromkeys(problem.entry for problem in self.problems if problem.entry))

    @property
    def fidelity(self) -> float | None:
        """Share of samples that agree, near ties included; None when none was compared."""
        total = self.fidelity_exact + self.fidelity_near_ties + self.fidelity_different
        return (total - self.fidelity_different) / total if total else None

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "fidelity": self.fidelity, "ok": self.ok}

    def to_text(self) -> str:
        """For people."""
        lines = [f"{problem.place}: {problem.what}" for problem in self.problems]
        lines.append(
            f"{'OK' if self.ok else f'{len(self.problems)} PROBLEMS'}: {self.parts} parts, {self.samples:,} samples, {self.tokens:,} tokens, "
            f"{self.chunks:,} chunks, {self.bytes_read:,} bytes checked"
        )
        if self.damaged:
            lines.append(f"damaged: {', '.join(self.damaged)}. {REPAIR[0].upper()}{REPAIR[1:]}".replace("CACHE", self.path))
        if any(entry.split("/")[0] == layout.TARGETS for entry in self.damaged):
            lines.append(f"targets are derived: {AGAIN}".replace("CACHE", self.path))
        if self.targets or self.stale_targets:
            stale = f"; {self.stale_targets} stale, never used" if self.stale_targets else ""
            lines.append(f"targets: {self.targets} groups of teacher tokens, all whole{stale}")
        if self.fidelity is not None:
            lines.append(
                f"teacher fidelity: {self.fidelity:.2%} of samples give the engine's own next token "
                f"({self.fidelity_exact} exactly, {self.fidelity_near_ties} near ties, {self.fidelity_different} different)"
            )
        if self.teacher_tokens:
            share = self.teacher_equals_data / self.teacher_tokens
            lines.append(f"teacher equals data: {share:.2%} of {self.teacher_tokens:,} supervised tokens (high when the target wrote the text)")
        return "\n".join(lines)
