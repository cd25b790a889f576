"""The pass that computes targets: verifier states of whole parts, read ahead by threads, through the target's head; once a cache.

In: the TeacherTargets of some caches and the head. Out: every part covered, or a word on why not. Each process takes its share of
the parts; all learn the same. A row's token is the one that training itself would compute.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..common import layout
from ..common.errors import CacheDamaged, RunFailed, guard_writing
from ..common.progress import ProgressBar
from .device import Compute, resolve_compute
from .dist import Processes
from .reader import CacheReader
from .target_head import TargetHead
from .targets import UNKNOWN, head_identity
from .teacher_targets import TeacherTargets, asked_rows

PIECE_PRODUCTS = 8
"""Products of the head in a piece of rows that is read at once."""
PIECES_AHEAD = 3
MAX_THREADS = 4
Advance = Callable[[int, int], None]
"""Told of progress: (rows of parts passed, tokens computed)."""


@dataclass(frozen=True)
class Coverage:
    """How the parts of some caches stand."""

    parts: int
    computed: int = 0
    """Parts whose targets were made now."""
    replaced: int = 0
    """Of these, parts whose targets were there, but damaged."""
    tokens: int = 0
    """Teacher tokens computed now."""
    bytes: int = 0
    """Bytes written now."""
    lacking: str = ""
    """Why not every part has targets; empty when each has."""


def targets_of(reader: CacheReader, head: TargetHead) -> TeacherTargets:
    """Those of a cache by this head, in the types and on the kind of device that it has."""
    return TeacherTargets(reader, head_identity(reader.path, reader.spec, str(head.dtype).removeprefix("torch."), head.device.type))


def cover(caches: Sequence[TeacherTargets], head: TargetHead, processes: Processes, *, store: bool, why_not: str = "") -> Coverage:
    """Check the targets of every part, all bytes; with `store` compute and publish what is missing or damaged. Called by all alike.

    why_not: said where parts lack targets and `store` is False. A folder that cannot be written is no error: it is said. Raises
    CacheDamaged for verifier states that are not as written.
    """
    jobs = [(targets, part) for targets in caches for part in range(len(targets.reader.parts))]
    found = {at: _state(*jobs[at]) for at in range(processes.rank, len(jobs), processes.size)}
    state = {at: text for share in processes.gather(found) for at, text in share.items()}
    missing = [at for at in sorted(state) if state[at]]
    if not missing:
        return Coverage(len(jobs))
    lacks = f"{len(missing)} of {len(jobs)} parts have no kept tokens"
    if not store:
        return Coverage(len(jobs), lacking=f"{why_not}; {lacks}" if why_not else lacks)
    if unwritable := processes.first_does(lambda: _unwritable([jobs[at][0] for at in missing])):
        return Coverage(len(jobs), lacking=f"{unwritable}, so that none are kept; {lacks}")
    replaced = sum(state[at] != "missing" for at in missing)
    own = [jobs[at] for at in missing[processes.rank :: processes.size]]
    done, tokens, written = 0, 0, 0
    with ProgressBar("targets", sum(_rows(*job) for job in own)) if processes.first else nullcontext() as bar:
        began, passed = time.monotonic(), 0

        def advance(rows: int, count: int) -> None:
            nonlocal passed
            passed += count
            if bar is not None:
                rate = passed * processes.size / max(time.monotonic() - began, 1e-9)
                bar.update(rows, f"{rate:,.0f} teacher tokens/s, {written / 1e6:,.1f} MB")

        results, lacks = compute(own, head, advance), ""
        for turn in range(-(-len(missing) // processes.size)):  # in step, so that none waits long for another
            outcomes = processes.gather(_one(own[turn] if turn < len(own) else None, results))
            for count, size, problem in outcomes:
                done, tokens, written = done + bool(size), tokens + count, written + size
                lacks = lacks or (problem and f"{problem}, so that no more are kept")
            if lacks:
                break
    return Coverage(len(jobs), done, replaced, tokens, written, lacks)


def compute(jobs: Sequence[tuple[TeacherTargets, int]], head: TargetHead, advance: Advance = lambda rows, count: None) -> Iterator[np.ndarray]:
    """For each (cache, part) its int32 [T]: the teacher's token after each row that a drafter is asked for, UNKNOWN elsewhere."""
    rows_at_once = PIECE_PRODUCTS * head.chunk_rows

    def pieces() -> Iterator[tuple[int, np.ndarray]]:
        for number, (targets, part) in enumerate(jobs):
            rows = asked_rows(targets.reader, part)
            yield from ((number, rows[start : start + rows_at_once]) for start in range(0, max(len(rows), 1), rows_at_once))

    ahead: deque[tuple[int, np.ndarray, Future[np.ndarray]]] = deque()
    coming = pieces()
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="dflash-targets") as threads:
        for number, (targets, part) in enumerate(jobs):
            tokens = np.full(_rows(targets, part), UNKNOWN, np.int32)
            passed = 0
            while True:
                while len(ahead) <= PIECES_AHEAD and (piece := next(coming, None)) is not None:
                    of, rows = jobs[piece[0]], piece[1]
                    ahead.append((*piece, threads.submit(_verifier_bits, of[0].reader, of[1], rows)))
                if not ahead or ahead[0][0] != number:
                    break
                _, rows, future = ahead.popleft()
                bits_nH = torch.from_numpy(future.result().view(np.int16)).view(torch.bfloat16)
                tokens[rows] = head.teacher_tokens(bits_nH.to(head.device)).cpu().numpy()
                now = int(rows[-1]) + 1 if len(rows) else 0
                advance(now - passed, len(rows))
                passed = max(now, passed)
            advance(len(tokens) - passed, 0)
            yield tokens


def _verifier_bits(reader: CacheReader, part: int, rows: np.ndarray) -> np.ndarray:
    """uint16 [n, H] of `rows` (ascending); only chunks that hold one of them are decoded."""
    found = reader.parts[part].manifest
    bits_nH = np.empty((len(rows), reader.spec.hidden_size), np.uint16)
    chunk_n = rows // found.chunk_tokens
    for number in np.unique(chunk_n).tolist():
        start, stop = number * found.chunk_tokens, min((number + 1) * found.chunk_tokens, found.tokens)
        here = chunk_n == number
        bits_nH[here] = reader.read_states(part, start, stop, layout.VERIFIER, (0,))[rows[here] - start, 0]
    return bits_nH


def _one(job: tuple[TeacherTargets, int] | None, results: Iterator[np.ndarray]) -> tuple[int, int, str]:
    """Compute and publish one part: (tokens, bytes, what the file system had against it)."""
    if job is None:
        return 0, 0, ""
    tokens = next(results)
    try:
        return int((tokens != UNKNOWN).sum()), job[0].publish(job[1], tokens), ""
    except OSError as error:
        return 0, 0, f"{job[0].folder} cannot be written ({error.strerror})"


def _state(targets: TeacherTargets, part: int) -> str:
    """Empty: whole. Else `missing`, or what is wrong."""
    try:
        return "" if targets.is_whole(part) else "missing"
    except CacheDamaged as error:
        return f"{error.place}: {error.problem}"


def _unwritable(caches: Sequence[TeacherTargets]) -> str:
    for targets in {id(found): found for found in caches}.values():
        try:
            targets.probe()
        except OSError as error:
            return f"{targets.folder.parent} cannot be written ({error.strerror})"
    return ""


def _rows(targets: TeacherTargets, part: int) -> int:
    return targets.reader.parts[part].manifest.tokens


@dataclass(frozen=True)
class TargetsReport:
    """The answer of `dflash targets`."""

    path: str
    head: str
    """Fingerprint of what computed them; the folder under targets/."""
    products: str
    device: str
    parts: int
    computed: int
    """Parts that had none, or none that could be used."""
    replaced: int
    """Of these, parts whose targets were damaged."""
    tokens: int
    """Teacher tokens computed."""
    bytes: int
    """Bytes written."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def to_text(self) -> str:
        """For people."""
        where = f"targets of all {self.parts} parts by head {self.head[:12]} ({self.products} on {self.device})"
        if not self.computed:
            return f"{where} are there and whole; nothing to do"
        damaged = f", {self.replaced} of them damaged before" if self.replaced else ""
        rate = self.tokens / max(self.seconds, 1e-9)
        return f"{where} are kept: {self.computed} parts computed{damaged}, {self.tokens:,} tokens, {self.bytes:,} bytes, {rate:,.0f} tokens/s"


def compute_targets(cache: Path, device: str = "auto", dtype: str = "auto") -> TargetsReport:
    """Compute and keep the targets of every part of `cache` that has none.

    Raises InputError when it is no cache or cannot be written, DiskFull, and CacheDamaged for a head or states that are not as written.
    """
    began = time.monotonic()
    compute_on: Compute = resolve_compute(device, dtype, "auto")
    reader = CacheReader(cache)
    head = TargetHead(cache, reader.spec, compute_on.device, compute_on.dtype)
    targets = targets_of(reader, head)
    done = cover([targets], head, Processes(device=compute_on.device), store=True)
    if done.lacking:
        with guard_writing(cache):
            targets.probe()  # says why
        raise RunFailed("could not be completed", place=str(targets.folder), found=done.lacking, fix="run the same command again")
    identity = targets.head
    return TargetsReport(
        path=str(cache),
        head=identity.fingerprint,
        products=identity.products,
        device=identity.device,
        parts=done.parts,
        computed=done.computed,
        replaced=done.replaced,
        tokens=done.tokens,
        bytes=done.bytes,
        seconds=round(time.monotonic() - began, 3),
    )
