"""Intake: takes the rows of a finished document and hands the sample to the writer, in a thread of its own.

The last door before the cache, the same for both engines: wrong row counts and non-finite states stop here. Runs in the
process that computed the rows, or for vLLM in one beside it (intake_process.py). The queue to the writer is bounded in bytes, so a slow disk holds
the engine back instead of filling the memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..common import planes, spec
from ..common.sample import Sample
from .writer import CacheWriter, take_seat

QUEUE_BYTES = 1 << 30
"""States that may wait for the writer; one larger sample is let through alone."""
Release = Callable[[], None]
"""Told when the arrays of a sample are not needed any more."""


class Intake:
    """Owns the CacheWriter, its seat and its thread. `offer` and `close` are called from one thread."""

    def __init__(self, cache: Path, writer_id: int = 0) -> None:
        self.spec = spec.load(cache)
        self._seat = take_seat(cache, writer_id)
        self._writer = CacheWriter(cache, self.spec, writer_id, overlapped=True)
        self._changed = threading.Condition()
        self._queue: deque[tuple[Sample, Release | None]] = deque()
        self._queued_bytes = self._queued_tokens = 0
        self._closing = False
        self._publish = True
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="cache-writer", daemon=True)
        self._thread.start()

    def offer(self, sample: Sample) -> str | None:
        """Queue `sample` for writing; returns the reason when it cannot be stored. May wait for the writer.

        Raises what the writer raised, once it has failed.
        """
        reason = check_rows(sample)
        if reason is None:
            self._put(sample, None)
        return reason

    def offer_checked(self, sample: Sample, release: Release) -> None:
        """Queue a sample that `check_rows` has passed and whose memory is bounded elsewhere: `release` gives it back. Never waits."""
        self._put(sample, release)

    def check(self) -> None:
        """Raises what the writer raised, once it has failed."""
        self._raise_error()

    def _put(self, sample: Sample, release: Release | None) -> None:
        size = _size(sample)
        with self._changed:
            if release is None:
                self._changed.wait_for(lambda: self._error is not None or not self._queue or self._queued_bytes + size <= QUEUE_BYTES)
            self._raise_error()
            self._queue.append((sample, release))
            self._queued_bytes += size
            self._queued_tokens += len(sample)
            self._changed.notify_all()

    def counts(self) -> dict[str, int]:
        """The fields of WriterCounts."""
        writer = self._writer
        with self._changed:
            queued = self._queued_tokens
        return {
            "samples": writer.samples,
            "tokens": writer.tokens,
            "stored_bytes": writer.stored_bytes,
            "parts": writer.parts,
            "pending_tokens": queued + writer.pending_tokens,
        }

    def close(self, *, publish: bool) -> None:
        """Write what is queued and publish it, or drop it and the pending part. Raises what the writer raised."""
        with self._changed:
            if not self._closing:
                self._closing, self._publish = True, publish
                self._changed.notify_all()
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        try:
            self._write_all()
        finally:
            with suppress(OSError):  # where nothing may be written, its folder stays until the next start
                self._seat.close()

    def _write_all(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self._closing)
                    if self._closing and (not self._queue or not self._publish):
                        break
                    sample, release = self._queue[0]
                self._writer.add(sample)
                with self._changed:
                    self._queue.popleft()
                    self._queued_bytes -= _size(sample)
                    self._queued_tokens -= len(sample)
                    self._changed.notify_all()
                if release is not None:
                    release()
            if self._publish:
                self._writer.close()
            else:
                self._writer.abandon()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._writer.abandon()


def _size(sample: Sample) -> int:
    return sample.hidden_states.nbytes + sample.verifier_last_hidden_states.nbytes


def check_rows(sample: Sample) -> str | None:
    """Why a sample cannot be stored: its rows are not as many as its tokens, or a state is not finite. Else None."""
    rows = len(sample.hidden_states), len(sample.verifier_last_hidden_states)
    return check_count(len(sample), *rows) or check_finite(sample.hidden_states, sample.verifier_last_hidden_states)


def check_count(tokens: int, *rows: int) -> str | None:
    """Why a sample cannot be stored: its rows are not as many as its tokens. Else None."""
    return f"the engine gave {rows[0]} rows for {tokens} tokens" if any(count != tokens for count in rows) else None


def check_finite(*states: np.ndarray) -> str | None:
    """Why rows cannot be stored: a state is infinite or NaN. Else None. states: bfloat16 patterns, uint16 [T, ...]."""
    if all(planes.all_finite(array) for array in states):
        return None
    bad = min(int(np.flatnonzero(~planes.is_finite(array).reshape(len(array), -1).all(1))[0]) for array in states if not planes.all_finite(array))
    return f"states are infinite or NaN, first at token {bad}"
