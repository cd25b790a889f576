"""Stalls: documents that an engine has taken and does not finish are named, instead of being waited for without end.

`InFlight` knows what is being computed and since when. `Watchdog` looks at it while the main thread waits inside an engine.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from types import TracebackType
from typing import Any

from ..common.errors import RunFailed
from .engine import Document, Engine, Outcome

SIGNAL = signal.SIGUSR2
"""By which the watchdog interrupts the main thread."""
NAMED = 3
"""So many of the oldest documents are named."""


class InFlight:
    """The documents that an engine has taken and not answered, oldest first."""

    def __init__(self) -> None:
        self._documents: dict[bytes, Document] = {}
        self._since = time.monotonic()

    def __len__(self) -> int:
        return len({id(document) for document in self._documents.values()})

    def __iter__(self) -> Iterator[Document]:
        """Each for the samples that are still to come."""
        left: dict[int, tuple[Document, list[bytes]]] = {}
        for key, document in self._documents.items():
            left.setdefault(id(document), (document, []))[1].append(key)
        return iter([document.wanting(keys) for document, keys in left.values()])

    def add(self, document: Document) -> None:
        """It has been taken."""
        if not self._documents:
            self._since = time.monotonic()
        self._documents.update(dict.fromkeys(document.keys, document))

    def sample_keys(self) -> list[bytes]:
        """Of the samples that are to come."""
        return list(self._documents)

    def alive(self) -> None:
        """There was a sign of life."""
        self._since = time.monotonic()

    def done(self, key: bytes) -> Document | None:
        """This sample of a document is done: the document for it alone; None when it is not in flight."""
        self.alive()
        document = self._documents.pop(key, None)
        return document and document.wanting([key])

    def watched(self, documents: Iterable[Document]) -> Iterator[Document]:
        """`documents`, each in flight from the moment it is taken."""
        for document in documents:
            self.add(document)
            yield document

    def finish(self, outcomes: Iterable[Outcome]) -> None:
        """These have been answered; none at all is a sign of life too."""
        self.alive()
        for outcome in outcomes:
            self.done(outcome.document.key)

    def silent_seconds(self) -> float:
        """How long nothing has been answered although something is in flight; 0 when nothing is."""
        return time.monotonic() - self._since if self._documents else 0.0

    def failure(self, seconds: float) -> RunFailed:
        """The error that names the oldest ones, after `seconds` of silence."""
        return RunFailed(
            f"no document has finished for {seconds:.0f} s, and {len(self)} are being computed",
            place="the engine",
            found=f"the oldest: {name_documents(self)}",
            fix="see whether the GPU is stuck or shared, and look at these rows. Published parts are kept, and the same command "
            "continues; `stall_seconds` is the limit",
        )


def name_documents(documents: Iterable[Document]) -> str:
    """Source and row of the first few."""
    shown = [f"{document.source} row {document.source_row}" for document in islice(documents, NAMED)]
    return ", ".join(shown)


def watched_run(engine: Engine, documents: Iterable[Document], seconds: float) -> Iterator[list[Outcome]]:
    """`engine.run(documents)`; raises RunFailed that names the oldest documents when none finishes for `seconds`."""
    in_flight = InFlight()
    with Watchdog(in_flight, seconds):
        for outcomes in engine.run(in_flight.watched(documents)):
            in_flight.finish(outcomes)
            yield outcomes


class Watchdog:
    """`with Watchdog(in_flight, seconds):` ends the block with RunFailed when it is silent for `seconds`.

    Interrupts the main thread as Ctrl-C would, which ends waiting for another process but no computation in native code. By a
    signal of its own, because a job in the background (`nohup dflash ... &`) ignores SIGINT. Elsewhere than in the main thread it
    does nothing.
    """

    def __init__(self, in_flight: InFlight, seconds: float) -> None:
        self._in_flight, self._seconds = in_flight, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watchdog", daemon=True)
        self._failure: RunFailed | None = None
        self._before: Any = None

    def __enter__(self) -> Watchdog:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(SIGNAL, signal.default_int_handler)
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            silent = self._in_flight.silent_seconds()
            if silent > self._seconds:
                self._failure = self._in_flight.failure(silent)
                os.kill(os.getpid(), SIGNAL)
                return

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        try:
            if self._thread.ident is not None:
                self._thread.join()
        except KeyboardInterrupt:
            if self._failure is None:
                raise
        finally:
            if self._thread.ident is not None:
                signal.signal(SIGNAL, self._before)
        if self._failure is not None and kind is KeyboardInterrupt:
            raise self._failure from None
