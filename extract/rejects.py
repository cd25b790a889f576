"""Rows that were not stored: the exception that rejects one, and the list of them in the cache (`rejects.jsonl`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..common import atomic, layout
from ..common.errors import CacheDamaged, guard_writing

MAX_LINE_BYTES = 1 << 20
"""A longer line is no reject."""


class RowRejected(Exception):
    """One row cannot be used; its text is the reason. Never ends a run."""


@dataclass(frozen=True)
class Reject:
    """A row that was not stored, and why."""

    source: str
    row: int
    """0-based."""
    reason: str


def count_reasons(rejects: Iterable[Reject]) -> dict[str, int]:
    """How often each reason occurs, commonest first; numbers in a reason are left out, so that like reasons meet."""
    return dict(Counter(_kind(reject.reason) for reject in rejects).most_common())


def _kind(reason: str) -> str:
    return re.sub(r"\d+", "N", reason.split(":")[0])


def save_rejects(cache: Path, rejects: Iterable[Reject], looked_at: Container[tuple[str, int]]) -> None:
    """Write `rejects.jsonl`: this run's, and those of earlier runs about rows (source, number) that this run did not look at.

    Raises DiskFull, InputError when it may not be written, CacheDamaged when the present one cannot be read.
    """
    path = cache / layout.REJECTS
    kept = [reject for reject in load_rejects(cache) if (reject.source, reject.row) not in looked_at]
    lines = sorted({*kept, *rejects}, key=lambda reject: (reject.source, reject.row, reject.reason))
    if lines or path.exists():
        with guard_writing(path):
            atomic.write_bytes(path, "".join(json.dumps(asdict(reject), ensure_ascii=False) + "\n" for reject in lines).encode())


def load_rejects(cache: Path) -> list[Reject]:
    """The listed rejects; none when the file is not there. Raises CacheDamaged naming a line that is none."""
    path = cache / layout.REJECTS
    if not path.is_file():
        return []
    rejects = []
    with open(path, "rb") as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
        for number, line in enumerate(lines, 1):
            try:
                rejects.append(Reject(**json.loads(line)))
            except (ValueError, TypeError, RecursionError):
                raise CacheDamaged("is no reject", place=f"{path} line {number}", found=line[:80], expected="source, row and reason") from None
    return rejects
