"""`dflash verify --repair`: moves what is damaged to `quarantine/` and says which samples are to be extracted again.

In: a cache folder. Out: a RepairReport. Deletes nothing and writes no part: the next `dflash extract` of the same command
stores what is missing. `cache.json` is the one file that cannot be had back this way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..common import layout, manifest, spec
from ..common.errors import CacheDamaged, guard_writing
from ..common.lock import only_writer
from ..common.quarantine import set_aside
from ..common.small_arrays import read_small
from ..common.spec import CacheSpec
from .verify import verify
from .verify_report import Problem, VerifyReport


@dataclass(frozen=True)
class Moved:
    """One entry of the cache that was set aside."""

    entry: str
    """Where it was, as a path in the cache."""
    to: str
    """Where it is, as a path in the cache."""
    why: str
    """The first thing that was wrong with it."""
    samples: int | None
    """Samples that it held by its manifest; None when that cannot be read, 0 for what is no part."""


@dataclass
class RepairReport:
    """The answer of `dflash verify --repair`."""

    path: str
    found: VerifyReport
    moved: list[Moved] = field(default_factory=list)
    extract_again: dict[str, list[int]] = field(default_factory=dict)
    """Rows, by source, whose samples no whole part holds any more."""
    unknown_parts: int = 0
    """Parts set aside that no longer say which rows they held."""
    left: list[Problem] = field(default_factory=list)
    """Problems that moving something away does not mend."""

    @property
    def ok(self) -> bool:
        """What is left of the cache is whole."""
        return not self.left

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "found": self.found.to_dict(), "ok": self.ok}

    def to_text(self) -> str:
        """For people."""
        lines = [self.found.to_text()] if not self.moved else []
        for moved in self.moved:
            held = "" if moved.samples == 0 else f" ({moved.samples:,} samples)" if moved.samples is not None else " (its samples cannot be listed)"
            lines.append(f"moved {moved.entry}{held} to {moved.to}: {moved.why.splitlines()[0]}")
        for source, rows in self.extract_again.items():
            lines.append(f"to extract again from {source}: {len(rows):,} rows: {ranges(rows)}")
        if self.unknown_parts:
            lines.append(f"to extract again: whatever was in {self.unknown_parts} parts that cannot be read any more")
        lines += [f"not repaired: {problem.place}: {problem.what}" for problem in self.left]
        if any(moved.entry.split("/")[0] == layout.TARGETS for moved in self.moved):
            lines.append(f"`dflash targets {self.path}` computes the teacher's tokens that were moved; training does so too")
        if any(moved.entry.split("/")[0] != layout.TARGETS for moved in self.moved):
            lines.append(
                f"run the same `dflash extract` command again: it writes what is missing and nothing else. {self.path}/quarantine is never read"
            )
        return "\n".join(lines)


def repair(cache: Path) -> RepairReport:
    """Verify `cache` and set aside every part that is damaged, and `target/` and `rejects.jsonl` if they are.

    Raises what `verify` raises (with cache.json itself damaged there is nothing to go by), InputError while an extraction
    writes into the cache or when nothing may be moved.
    """
    found_spec = spec.load(cache)
    with only_writer(cache):
        found = verify(cache)
        report = RepairReport(str(cache), found, left=[problem for problem in found.problems if not problem.entry])
        lost: dict[bytes, tuple[str, int]] = {}
        for entry in found.damaged:
            why = next(problem.what for problem in found.problems if problem.entry == entry)
            samples: int | None = 0
            if entry.startswith(f"{layout.PARTS}/"):
                samples = _look_into(cache / entry, found_spec, lost, report)
            with guard_writing(cache):
                to = set_aside(cache, cache / entry) if (cache / entry).exists() or (cache / entry).is_symlink() else None
            if to is not None:
                report.moved.append(Moved(entry, to.relative_to(cache).as_posix(), why, samples))
        if lost:
            for key in _stored_keys(cache, found_spec):
                lost.pop(key, None)
        for source, row in sorted(lost.values()):
            report.extract_again.setdefault(source, []).append(row)
    return report


def _look_into(part: Path, found_spec: CacheSpec, lost: dict[bytes, tuple[str, int]], report: RepairReport) -> int | None:
    """Add the samples of a damaged part to `lost`, as far as it can still be read; returns how many it held."""
    if layout.parse_part_name(part.name) is None or part.is_symlink() or not part.is_dir():
        return 0
    samples = None
    try:
        found = manifest.read(part, found_spec)
        samples = found.samples
        keys, rows, sources = (read_small(part, found, found_spec, name) for name in ("sample_key", "source_row", "source_index"))
        lost |= {key.tobytes(): (found.sources[int(source)], int(row)) for key, row, source in zip(keys, rows, sources, strict=True)}
    except (CacheDamaged, IndexError):
        report.unknown_parts += 1
    return samples


def _stored_keys(cache: Path, found_spec: CacheSpec) -> Iterable[bytes]:
    for part in manifest.list_parts(cache):
        yield from (key.tobytes() for key in read_small(part, manifest.read(part, found_spec), found_spec, "sample_key"))


def ranges(rows: list[int]) -> str:
    """`0-2, 5, 7-8` for the ascending rows 0, 1, 2, 5, 7, 8; the first twenty runs of them."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    runs = [(rows[start], rows[stop - 1]) for start, stop in pairwise([0, *breaks.tolist(), len(rows)])]
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:20]]
    return ", ".join(texts) + (f" and {len(runs) - 20:,} more runs (--json lists all)" if len(runs) > 20 else "")
