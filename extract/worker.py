"""One process of an extraction: an engine of its own, documents from the parent, outcomes back to it.

The features stay here and go into parts of this process's own. What crosses are ids, outcomes and counts, as the records
below. `workers.WorkerPool` is the other side.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np

from .devices import VARIABLE
from .engine import Document, Engine, EngineJob, Outcome, WriterCounts
from .orphans import end_with_parent
from .remote_errors import describe

StartEngine = Callable[[EngineJob], Engine]
NOTHING = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class Ready:
    """The engine has started."""


@dataclass(frozen=True)
class Ask:
    """Give me documents. The answer is a list of them, empty when there are no more."""


@dataclass(frozen=True)
class Answered:
    """Outcomes, their documents without what was asked, and the writer's counts after them."""

    outcomes: list[Outcome]
    counts: WriterCounts


@dataclass(frozen=True)
class Drained:
    """All documents are answered. The answer is True when the pending part may be published."""


@dataclass(frozen=True)
class Closed:
    """Published, and the end."""

    counts: WriterCounts


@dataclass(frozen=True)
class Failed:
    """The error that ends this process, as `remote_errors.describe` gives it."""

    error: dict[str, str | None]


Message = Ready | Ask | Answered | Drained | Closed | Failed


def work(start_engine: StartEngine, job: EngineJob, devices: str | None, parent: Connection) -> None:
    """The whole life of the process. devices: the GPUs that it may see."""
    end_with_parent(signal.SIGKILL)
    os.setpgid(0, 0)  # so that the parent can end it together with what it started, and Ctrl-C is the parent's to handle
    if devices is not None:
        os.environ[VARIABLE] = devices
    try:
        _extract(start_engine, job, parent)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except Exception as error:
        parent.send(Failed(describe(error)))


def _extract(start_engine: StartEngine, job: EngineJob, parent: Connection) -> None:
    engine = start_engine(job)
    try:
        parent.send(Ready())
        for outcomes in engine.run(_documents(parent)):
            parent.send(Answered([_without_tokens(outcome) for outcome in outcomes], engine.counts()))
        parent.send(Drained())
        publish = bool(parent.recv())
    except BaseException:
        engine.close(publish=False)
        raise
    parent.send(Closed(engine.close(publish=publish)))


def _documents(parent: Connection) -> Iterator[Document]:
    while True:
        parent.send(Ask())
        batch = parent.recv()
        if not batch:
            return
        yield from batch


def _without_tokens(outcome: Outcome) -> Outcome:
    return replace(outcome, document=replace(outcome.document, input_ids=NOTHING, loss_mask=NOTHING, script=None))
