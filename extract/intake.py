"""Intake: takes the rows of a finished document and hands the sample to the writer, in a thread of its own.

The last door before the cache, the same for both engines: wrong row counts and non-finite states stop here. Runs in the
process that computed the rows (for vLLM: the worker). The queue to the writer is bounded in bytes, so a slow disk holds
the engine back instead of filling the memory.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..common import planes, spec
from ..common.sample import Sample
from .writer import CacheWriter, take_seat

QUEUE_BYTES = 1 << 30
"""States that may wait for the writer; one larger sample is let through alone."""


class Intake:
    """Owns the CacheWriter, its seat and its thread. `offer` and `close` are called from one thread."""

    def __init__(self, cache: Path, writer_id: int = 0) -> None:
        self.spec = spec.load(cache)
        self._seat = take_seat(cache, writer_id)
        self._writer = CacheWriter(cache, self.spec, writer_id)
        self._changed = threading.Condition()
        self._queue: deque[Sample] = deque()
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
        if reason is not None:
            return reason
        size = sample.hidden_states.nbytes + sample.verifier_last_hidden_states.nbytes
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._queue or self._queued_bytes + size <= QUEUE_BYTES)
            self._raise_error()
            self._queue.append(sample)
            self._queued_bytes += size
            self._queued_tokens += len(sample)
            self._changed.notify_all()
        return None

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
                    sample = self._queue[0]
                self._writer.add(sample)
                with self._changed:
                    self._queue.popleft()
                    self._queued_bytes -= sample.hidden_states.nbytes + sample.verifier_last_hidden_states.nbytes
                    self._queued_tokens -= len(sample)
                    self._changed.notify_all()
            if self._publish:
                self._writer.close()
            else:
                self._writer.abandon()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._writer.abandon()


def check_rows(sample: Sample) -> str | None:
    """Why a sample cannot be stored: its rows are not as many as its tokens, or a state is not finite. Else None."""
    rows = (len(sample.hidden_states), len(sample.verifier_last_hidden_states))
    if rows != (len(sample), len(sample)):
        return f"the engine gave {rows[0]} rows for {len(sample)} tokens"
    if not (planes.is_finite(sample.hidden_states).all() and planes.is_finite(sample.verifier_last_hidden_states).all()):
        bad = np.flatnonzero(~planes.is_finite(sample.hidden_states).all((1, 2)) | ~planes.is_finite(sample.verifier_last_hidden_states).all(1))
        return f"states are infinite or NaN, first at token {bad[0]}"
    return None
