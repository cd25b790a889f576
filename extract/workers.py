"""WorkerPool: several processes, each with an engine of its own, that share one queue of documents.

A process asks for the next documents when it needs some. One that dies is replaced; what it had not published is done again
by whoever asks next, and what it had published, by its parts on disk, is not. To `run` the pool looks like one engine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

from ..common.errors import DflashError, DiskFull, InputError, RunFailed
from .engine import Document, EngineJob, Outcome, WriterCounts, merged
from .published import parts_of, read_published
from .remote_errors import rebuild
from .stall import InFlight, name_documents
from .worker import Answered, Ask, Closed, Drained, Failed, Message, Ready, StartEngine, work
from .writer import clear_writer

START_METHOD = "spawn"
"""A fresh interpreter: what a forked one would inherit (CUDA, threads) does not survive."""
HANDED_OUT = 16
"""Documents given at once."""
DEATHS, DEATHS_WITH_DOCUMENT = 3, 5
"""So many deaths in a row without a finished document, or that hit one document, and the run fails."""
END_SECONDS = 30.0
"""How long a process that has published may take to end."""
LOOK_SECONDS = 0.2
"""How often to look for processes that died or stalled."""

OnLost = Callable[[Sequence[Outcome]], None]
"""Told of outcomes that do not hold: the samples were not published and will be computed again."""
OnEvent = Callable[..., None]
"""Told what happened: a name, and what goes with it."""


@dataclass
class _Worker:
    """One process, from its start to its end."""

    number: int
    job: EngineJob
    process: Any
    connection: Connection
    parts_before: set[str]
    ready: bool = False
    asks: bool = False
    drained: bool = False
    closed: bool = False
    in_flight: InFlight = field(default_factory=InFlight)
    unpublished: deque[Outcome] = field(default_factory=deque)
    """Stored by its own word, in the order in which its parts will hold them."""
    known_published: int = 0
    counts: WriterCounts = field(default_factory=WriterCounts)
    failure: DflashError | None = None
    """What ended it, by its own word."""


class WorkerPool:
    """See `engine.Engine`; `run` also tells of outcomes that are lost again."""

    def __init__(self, job: EngineJob, start_engine: StartEngine, devices: Sequence[str | None], on_event: OnEvent) -> None:
        """Start a process for each entry of `devices` and wait until all are ready.

        job.writer_id and the following multiples of world_size are their writers' ids. Raises what an engine raises that cannot start.
        """
        self._job, self._start_engine, self._devices, self._on_event = job, start_engine, devices, on_event
        self._context: Any = multiprocessing.get_context(START_METHOD)
        self._queue: Iterator[Document] = iter(())
        self._again: deque[Document] = deque()
        self._exhausted = False
        self._past = WriterCounts()
        self._deaths, self._deaths_with = 0, Counter[bytes]()
        self._on_lost: OnLost = lambda outcomes: None
        self._workers: list[_Worker] = []
        self._started = False
        try:
            for number in range(len(devices)):
                self._workers.append(self._start(number))
            while not all(worker.ready for worker in self._workers):
                self._listen()
        except BaseException:
            self.close(publish=False)
            raise
        self._started = True

    def run(self, documents: Iterable[Document], on_lost: OnLost, before_publishing: Callable[[], None]) -> Iterator[list[Outcome]]:
        """See `engine.Engine`; publishes as well, after `before_publishing` has found nothing wrong.

        A document has one outcome, and another one after each time that `on_lost` was told of it.
        """
        self._queue, self._on_lost = iter(documents), on_lost
        while not all(worker.closed for worker in self._workers):
            self._hand_out()
            if outcomes := self._listen():
                yield outcomes
            if self._exhausted and not self._again and all(worker.drained or worker.closed for worker in self._workers):
                before_publishing()
                for worker in self._workers:
                    if not worker.closed and worker.asks:
                        self._send(worker, True)

    def counts(self) -> WriterCounts:
        """See `engine.Engine`."""
        return _sum([self._past, *(worker.counts for worker in self._workers)])

    def close(self, *, publish: bool) -> WriterCounts:
        """See `engine.Engine`. `run` has published; whatever is still at work here is ended, and what it has not published is lost."""
        for worker in self._workers:
            if not worker.closed:
                worker.closed = True
                self._end(worker)
                with suppress(Exception):  # the error that led here is the one to show
                    clear_writer(self._job.cache, worker.job.writer_id)
        return self.counts()

    def _start(self, number: int) -> _Worker:
        writer_id = self._job.writer_id + number * self._job.config.world_size
        job = replace(self._job, writer_id=writer_id)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(self._start_engine, job, self._devices[number], theirs), name=f"dflash-worker-{number}")
        before = {part.name for part in parts_of(job.cache, writer_id)}
        process.start()
        theirs.close()
        return _Worker(number, job, process, ours, before)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.asks and not worker.drained and not worker.closed:
                batch = list(islice(self._next_documents(), HANDED_OUT))
                for document in batch:
                    worker.in_flight.add(document)
                self._send(worker, batch)

    def _next_documents(self) -> Iterator[Document]:
        while True:
            document = self._again.popleft() if self._again else next(self._queue, None)
            if document is None:
                self._exhausted = True
                return
            yield document

    def _send(self, worker: _Worker, answer: object) -> None:
        worker.asks = False
        with suppress(OSError):  # it has died, which is noticed where all deaths are
            worker.connection.send(answer)

    def _listen(self) -> list[Outcome]:
        """Wait a little for messages; take in what came, replace the dead, and complain of stalls."""
        alive = [worker for worker in self._workers if not worker.closed]
        heard = wait([worker.connection for worker in alive], LOOK_SECONDS)
        outcomes: list[Outcome] = []
        for worker in alive:
            ended = False
            if worker.connection in heard:
                ended, found = self._read(worker)
                outcomes += found
            if not worker.closed and (ended or not worker.process.is_alive()):
                outcomes += self._bury(worker)
            elif worker.in_flight.silent_seconds() > self._job.config.stall_seconds:
                raise worker.in_flight.failure(worker.in_flight.silent_seconds())
        if outcomes:
            self._deaths = 0
        return outcomes

    def _read(self, worker: _Worker) -> tuple[bool, list[Outcome]]:
        """(has it ended, outcomes) from what the process has sent so far."""
        outcomes: list[Outcome] = []
        try:
            while worker.connection.poll():
                outcomes += self._take(worker, worker.connection.recv())
        except (EOFError, OSError):
            return True, outcomes
        return False, outcomes

    def _take(self, worker: _Worker, message: Message) -> list[Outcome]:
        match message:
            case Ready():
                worker.ready = True
            case Ask():
                worker.asks = True
            case Drained():
                worker.asks = worker.drained = True
            case Closed(counts):
                self._published(worker, counts)
                worker.closed = True
                self._end(worker, patience=END_SECONDS)
            case Answered(outcomes, counts):
                worker.in_flight.alive()
                whole = [replace(outcome, document=document) for outcome in outcomes if (document := worker.in_flight.done(outcome.document.key))]
                worker.unpublished += [outcome for outcome in whole if outcome.reject is None]
                self._published(worker, counts)
                return whole
            case Failed(error):
                worker.failure = rebuild(error)
        return []

    def _published(self, worker: _Worker, counts: WriterCounts) -> None:
        worker.counts = counts
        while worker.known_published < counts.samples and worker.unpublished:
            worker.unpublished.popleft()
            worker.known_published += 1

    def _bury(self, worker: _Worker) -> list[Outcome]:
        """Settle what became of a dead process's documents, and start another in its place if there is work. Its last outcomes."""
        self._end(worker)
        outcomes = self._read(worker)[1]
        worker.connection.close()
        if worker.closed:
            return outcomes
        worker.closed = True
        clear_writer(self._job.cache, worker.job.writer_id)  # waits for whatever of it is still at work
        error = worker.failure or _death(worker)
        if isinstance(error, (InputError, DiskFull)) or (worker.failure is not None and not self._started):
            raise error
        found, lost = self._settle(worker)
        self._on_lost(lost)
        again = merged([*(outcome.document for outcome in lost), *worker.in_flight])
        self._again.extendleft(reversed(again))
        self._on_event("worker_died", worker=worker.number, error=str(error), documents_to_repeat=len(again), published=worker.counts.samples)
        self._judge(error, again)
        if self._again or not self._exhausted:  # what an earlier death left may still wait for this very process
            self._workers[worker.number] = self._start(worker.number)
            self._past = _sum([self._past, worker.counts])
        return outcomes + found

    def _settle(self, worker: _Worker) -> tuple[list[Outcome], list[Outcome]]:
        """(outcomes of documents that were published and not answered, outcomes that do not hold), by the parts on disk."""
        published, worker.counts = read_published(self._job.cache, self._job.spec, worker.job.writer_id, worker.parts_before)
        kept = worker.known_published + sum(outcome.document.key in published for outcome in worker.unpublished)
        lost = [outcome for outcome in worker.unpublished if outcome.document.key not in published]
        found = []
        for key in worker.in_flight.sample_keys():
            if (sample := published.get(key)) is not None and (document := worker.in_flight.done(key)) is not None:
                found.append(Outcome(document, sample.tokens, sample.supervised_tokens, sample.engine_top1))
        if kept + len(found) != len(published):
            raise RunFailed(
                "the parts of a process that died do not hold what it had said",
                place=f"process {worker.number}",
                found=f"{len(published)} samples published, {kept} of them reported and {len(found)} not",
                fix="run `dflash verify` on the cache and report this",
            )
        return found, lost

    def _judge(self, error: DflashError, again: Sequence[Document]) -> None:
        """Raise RunFailed when dying has become a habit."""
        self._deaths += 1
        self._deaths_with.update(document.key for document in again)
        often = [document for document in again if self._deaths_with[document.key] >= DEATHS_WITH_DOCUMENT]
        if self._deaths >= DEATHS or often:
            what = f"with the same documents, among them {name_documents(often)}" if often else "without finishing a document in between"
            raise RunFailed(
                f"processes died {DEATHS_WITH_DOCUMENT if often else DEATHS} times {what}",
                place="--workers",
                found=error,
                fix="mend what the last error says; published parts are kept, and the same command continues",
            )

    def _end(self, worker: _Worker, patience: float = 0.0) -> None:
        """End the process, if it does not by itself within `patience` seconds, and whatever it started."""
        if patience:
            worker.process.join(patience)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.join()


def _death(worker: _Worker) -> RunFailed:
    code = worker.process.exitcode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    return RunFailed(
        f"process {worker.number} of the extraction {how}",
        place="--workers",
        fix="signal 9 often means that memory ran out: see the system's log, and use fewer processes",
    )


def _sum(counts: Iterable[WriterCounts]) -> WriterCounts:
    total = list(counts)
    return WriterCounts(**{item.name: sum(getattr(one, item.name) for one in total) for item in fields(WriterCounts)})
