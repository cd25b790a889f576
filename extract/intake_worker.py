"""The writing process of an engine: rows in shared memory and records about them in, parts of the cache out.

Here Python's lock is the writer's alone: the threads that encode would otherwise hold up the thread that launches the engine's
kernels, and it them. In: the records below, from `intake_process.IntakeProcess`. Out: which rows are written, counts, and the
error that ends it. Ends with its parent, and when that closes the connection. Imports no torch.
"""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from ..common.sample import Sample
from .intake import Intake
from .orphans import end_with_parent
from .remote_errors import describe
from .row_memory import attach

COUNTS_SECONDS = 0.5
"""How often the parent is told of counts that have changed, and of an error, when nothing else is to be said."""
GONE = (EOFError, BrokenPipeError, ConnectionResetError)
"""What a connection raises whose other end is closed."""


@dataclass(frozen=True)
class Layout:
    """What the process is started with: the cache, and what its parent's memory holds."""

    cache: str
    writer_id: int
    memory_bytes: int
    columns: int
    """C, captured layers of a row."""
    width: int
    """H."""
    feature_columns: tuple[int, ...]
    verifier_column: int


@dataclass(frozen=True)
class Offer:
    """Write the sample whose T rows lie at `offset`: bfloat16 patterns, uint16 [T, C, H]."""

    offset: int
    key: bytes
    source: str
    source_row: int
    input_ids: bytes
    """int32 [T]."""
    loss_mask: bytes
    """uint8 [T]."""
    engine_top1: int
    next_token: int

    def __len__(self) -> int:
        return len(self.loss_mask)


@dataclass(frozen=True)
class Close:
    """No more is offered: publish what is pending, or drop it."""

    publish: bool


@dataclass(frozen=True)
class Answer:
    """From the process: the fields of WriterCounts by now, and what happened."""

    counts: dict[str, int]
    released: int | None = None
    """The offset whose rows are not needed any more."""
    closed: bool = False
    error: dict[str, str | None] | None = None
    """As `remote_errors.describe` gives it: the end."""


def main(connection_fd: int, memory_fd: int, parent: int) -> None:
    """The whole life of the process. parent: the process whose death ends it; 0: only the connection's end does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a run at once; the parent decides what is published
        signal.signal(number, signal.SIG_IGN)
    if parent:
        end_with_parent(signal.SIGKILL, parent)
    with Connection(connection_fd) as connection, suppress(*GONE):
        nothing = {"samples": 0, "tokens": 0, "stored_bytes": 0, "parts": 0, "pending_tokens": 0}
        try:
            layout = connection.recv()
            memory = attach(memory_fd, layout.memory_bytes)
            intake = Intake(Path(layout.cache), layout.writer_id)
        except Exception as error:
            connection.send(Answer(nothing, error=describe(error)))
            return
        _write(connection, layout, memory, intake)


def _write(connection: Connection, layout: Layout, memory: np.ndarray, intake: Intake) -> None:
    sending = threading.Lock()
    told: dict[str, int] = {}

    def tell(**what: object) -> None:
        nonlocal told
        with sending:
            told = intake.counts()
            connection.send(Answer(told, **what))  # type: ignore[arg-type]

    try:
        tell()
        while True:
            if not connection.poll(COUNTS_SECONDS):
                intake.check()
                if intake.counts() != told:
                    tell()
                continue
            for message in connection.recv():
                if isinstance(message, Close):
                    intake.close(publish=message.publish)
                    tell(closed=True)
                    return
                intake.offer_checked(sample_of(message, layout, memory), partial(tell, released=message.offset))
    except GONE:
        with suppress(Exception):
            intake.close(publish=False)
    except Exception as error:
        with suppress(Exception):
            intake.close(publish=False)  # waits until the pending part is gone
        tell(error=describe(error))


def sample_of(offer: Offer, layout: Layout, memory: np.ndarray) -> Sample:
    """The sample, its states a view of the memory where the columns of the features lie together."""
    shape = (len(offer), layout.columns, layout.width)
    rows_TCH = memory[offer.offset :][: 2 * shape[0] * shape[1] * shape[2]].view(np.uint16).reshape(shape)
    columns = list(layout.feature_columns)
    features = slice(len(columns)) if columns == list(range(len(columns))) else columns
    return Sample(
        key=offer.key,
        source=offer.source,
        source_row=offer.source_row,
        input_ids=np.frombuffer(offer.input_ids, np.int32),
        loss_mask=np.frombuffer(offer.loss_mask, np.uint8),
        hidden_states=rows_TCH[:, features],
        verifier_last_hidden_states=rows_TCH[:, layout.verifier_column],
        engine_top1=offer.engine_top1,
        next_token=offer.next_token,
    )
