"""RowCopies: the rows of finished requests, from the KV cache to host memory, without holding the engine up.

Owns the order of things between streams and threads:
- On a GPU rows are gathered and copied by a stream of their own into page-locked memory that is got once (row_memory.py). It waits for the forward
  passes that wrote the rows (`mark_written`, called before the next pass), and runs beside the next one, which cannot touch them:
  their blocks are let go only when the copy is complete (`landed`).
- When that memory is full, requests wait with their blocks, so that a slow disk holds the engine back and nothing grows.
- Whether the states are finite is looked at by threads, not by the engine's.
On a CPU the same, with plain memory and copies that are complete at once. Knows nothing of vLLM, samples or the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from .arena import Arena
from .intake import check_finite
from .row_memory import RowMemory

ARENA_BYTES = 2 << 30
"""Host memory for rows that are being copied, checked and written: two steps of 16,384 tokens of an 8B target."""
PIECE_BYTES = 64 << 20
"""Gathered at once; bounds what this takes of the GPU's memory, which the engine does not know of."""
CHECKING_THREADS = 2
READ = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(KV cache, slots, count) -> [count, C, H]: the engine's own way to read its cache."""


@dataclass(frozen=True)
class FinishedRequest:
    """A request whose rows are to be copied."""

    request_id: str
    key: str
    token_ids: list[int]
    """Of every row: all tokens of the request but the last, which was never fed to the target."""
    computed: int
    """Tokens that the engine says it has computed."""
    block_ids: list[int]


@dataclass
class Rows:
    """Copied rows that wait for their commit."""

    token_ids: list[int]
    bits_TCH: np.ndarray
    """bfloat16 patterns, uint16, C captured layers, in the memory: valid until `release`."""
    offset: int
    """Where in the memory they begin, in bytes."""
    bad: str | None
    """Why the states cannot be stored."""
    release: Callable[[], None]


@dataclass
class _Copy:
    """One request on its way."""

    request: FinishedRequest
    bits_TCH: np.ndarray
    offset: int
    event: torch.cuda.Event | None
    """Complete once the rows are in host memory; None on a CPU, where they are already."""
    checked: Future[str | None]


class RowCopies:
    """Use: `submit` what finished, `advance` once a step, `landed` for blocks that may go, `take` to commit. One thread calls it."""

    def __init__(self, states: torch.Tensor, block_size: int, columns: int, width: int, longest: int, read: READ) -> None:
        """states: the layer of the KV cache that holds C = `columns` states of `width` for each token. longest: tokens of a document."""
        self._states, self._block_size, self._columns, self._width, self._read = states, block_size, columns, width, read
        self._row_bytes = columns * width * 2
        self._arena = Arena(max(ARENA_BYTES, longest * self._row_bytes))
        self.memory = RowMemory(self._arena.capacity, states.device if states.is_cuda else None)
        """What the rows are copied into."""
        self._stream = torch.cuda.Stream(states.device) if states.is_cuda else None
        self._written: torch.cuda.Event | None = None
        self._waiting: deque[FinishedRequest] = deque()
        self._copying: dict[str, _Copy] = {}  # by request id, until it has landed
        self._copies: dict[str, _Copy] = {}  # by key, until it is taken
        self._checkers = ThreadPoolExecutor(CHECKING_THREADS, thread_name_prefix="cache-check")

    @property
    def held_back(self) -> bool:
        """Do requests wait for memory that the writer has not given back yet?"""
        return bool(self._waiting)

    def mark_written(self) -> None:
        """What finished so far has been computed by what is queued on the GPU by now. To be called before the next forward pass."""
        if self._stream is not None:
            self._written = torch.cuda.Event()
            self._written.record()

    def submit(self, requests: Sequence[FinishedRequest]) -> None:
        """Copy their rows as soon as there is memory."""
        self._waiting.extend(requests)

    def advance(self) -> None:
        """Begin the copies for which there is memory, oldest first."""
        while self._waiting:
            request = self._waiting[0]
            rows = max(0, min(len(request.token_ids), request.computed, len(request.block_ids) * self._block_size))
            offset = self._arena.take(rows * self._row_bytes)
            if offset is None:
                return
            self._waiting.popleft()
            place = self.memory.tensor[offset : offset + rows * self._row_bytes].view(torch.bfloat16).view(rows, self._columns, self._width)
            event = self._copy(request, place)
            bits_TCH = place.view(torch.int16).numpy().view(np.uint16)
            copy = _Copy(request, bits_TCH, offset, event, self._checkers.submit(_check, event, bits_TCH))
            self._copying[request.request_id] = self._copies[request.key] = copy

    def give_up(self) -> set[str]:
        """Forget the requests that wait for memory: none will be given back. Their blocks may be used again."""
        given_up = {request.request_id for request in self._waiting}
        self._waiting.clear()
        return given_up

    def landed(self) -> set[str]:
        """The requests whose rows are in host memory since the last call: their blocks may be used again."""
        done = {name for name, copy in self._copying.items() if copy.event is None or copy.event.query()}
        for name in done:
            del self._copying[name]
        return done

    def take(self, key: str) -> Rows | None:
        """The rows of a document, once they are copied and checked. Raises what the copy raised."""
        copy = self._copies.get(key)
        if copy is None or not copy.checked.done():
            return None
        del self._copies[key]
        bad = copy.checked.result()
        return Rows(copy.request.token_ids, copy.bits_TCH, copy.offset, bad, lambda: self._arena.give_back(copy.offset))

    def close(self) -> None:
        """Let the threads end."""
        self._checkers.shutdown(wait=True)

    @torch.inference_mode()  # the cache may have been made in it, and not every caller is
    def _copy(self, request: FinishedRequest, place: torch.Tensor) -> torch.cuda.Event | None:
        """Queue, or on a CPU do, the copy of a request's first rows into `place`, bfloat16 [rows, C, H]."""
        stream, rows = self._stream, len(place)
        if stream is not None and self._written is not None:
            stream.wait_event(self._written)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            blocks = torch.tensor(request.block_ids, dtype=torch.int64, pin_memory=stream is not None)
            blocks = blocks.to(self._states.device, non_blocking=True)
            within = torch.arange(self._block_size, device=self._states.device)
            slots = (blocks[:, None] * self._block_size + within).flatten()[:rows]
            step = max(1, PIECE_BYTES // self._row_bytes)
            for start in range(0, rows, step):
                piece = slots[start : start + step]
                found = self._read(self._states, piece, len(piece))
                if found.shape != (len(piece), self._columns, self._width):
                    raise ValueError(
                        f"states of shape {tuple(found.shape)} came out of the KV cache; expected {(len(piece), self._columns, self._width)}"
                    )
                place[start : start + step].copy_(found, non_blocking=True)
            if stream is None:
                return None
            event = torch.cuda.Event(blocking=True)
            event.record()
            return event


def _check(event: torch.cuda.Event | None, bits_TCH: np.ndarray) -> str | None:
    if event is not None:
        event.synchronize()
    return check_finite(bits_TCH)
