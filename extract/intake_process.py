"""IntakeProcess: the intake of an engine, in a process of its own.

Owns the process and what it was offered and has not written yet. In: rows that lie in a RowMemory, checked, and what belongs to
them. Out: the same as of an Intake: counts, and the writer's error as itself. `intake_worker` is the other side.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from ..common.errors import DflashError, RunFailed
from .intake import Release
from .intake_worker import GONE, Answer, Close, Layout, Offer
from .remote_errors import describe, rebuild
from .row_memory import RowMemory

START = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {__package__}.intake_worker import main; main(*map(int, sys.argv[2:]))"
"""Run by the process: what this one can import, and nothing of the folder in which it happens to stand."""
EXIT_SECONDS = 30.0
"""How long a process that has closed its connection may take to end, before it is killed."""


class IntakeProcess:
    """`offer_checked`, `check` and `close` are called from one thread. Not `multiprocessing`: a worker of vLLM is a daemon, which may have no children."""

    def __init__(
        self, cache: Path, writer_id: int, memory: RowMemory, columns: int, width: int, feature_columns: list[int], verifier_column: int
    ) -> None:
        """memory: holds rows of C = `columns` states of H = `width`. Raises what the cache raises that cannot be written."""
        ours, theirs = socket.socketpair()
        in_main = threading.current_thread() is threading.main_thread()  # the kernel means the thread that starts a process by its parent
        handles = theirs.fileno(), memory.fd
        arguments = [json.dumps(sys.path), *(str(handle) for handle in handles), str(os.getpid() if in_main else 0)]
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-c", START, *arguments], stdin=subprocess.DEVNULL, pass_fds=handles)
        self._connection = Connection(ours.detach())
        self._offered: dict[int, Release] = {}  # by offset
        self._offered_tokens = 0
        self._error: DflashError | None = None
        self._closing = self._closed = False
        layout = Layout(str(cache), writer_id, memory.nbytes, columns, width, tuple(feature_columns), verifier_column)
        with suppress(*GONE):
            self._connection.send(layout)
        self._counts = {"samples": 0, "tokens": 0, "stored_bytes": 0, "parts": 0, "pending_tokens": 0}
        self._hear()  # it is ready, or why not
        if self._error is not None:
            self._end()
            raise self._error
        self._reader = threading.Thread(target=self._listen, name="cache-intake", daemon=True)
        self._reader.start()
        self._outgoing: SimpleQueue[Offer | Close] = SimpleQueue()
        threading.Thread(target=self._speak, name="cache-offers", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def failed(self) -> bool:
        """Has the writer met an error, or its process ended?"""
        return self._error is not None

    def check(self) -> None:
        """Raises what the writer raised, once it has failed; RunFailed when its process has ended."""
        if self._error is not None:
            raise self._error

    def offer_checked(self, offer: Offer, release: Release) -> None:
        """Queue a sample that `check_rows` would pass. Never waits. `release` is told, by another thread, when its rows are not needed any more."""
        self.check()
        self._offered[offer.offset] = release
        self._offered_tokens += len(offer)
        self._outgoing.put(offer)

    def counts(self) -> dict[str, int]:
        """The fields of WriterCounts."""
        counts = self._counts
        return counts | {"pending_tokens": 0 if self._closed else self._offered_tokens - counts["tokens"]}

    def close(self, *, publish: bool) -> None:
        """Write what was offered and publish it, or drop it and the pending part; the process has ended then. Raises what the writer raised."""
        if not self._closing:
            self._closing = True
            self._outgoing.put(Close(publish))
        self._reader.join()
        self._end()
        self.check()

    def _listen(self) -> None:
        while not self._closed and self._error is None:
            try:
                self._hear()
            except Exception as error:  # of ours; without this thread nothing would ever be given back
                self._error = rebuild(describe(error))

    def _speak(self) -> None:
        """Send what is queued, all that there is at once: the process takes long to answer when its threads are busy."""
        messages: list[Offer | Close] = []
        with suppress(*GONE):  # `_listen` hears why
            while not (messages and isinstance(messages[-1], Close)):
                messages = [self._outgoing.get()]
                while not self._outgoing.empty():
                    messages.append(self._outgoing.get())
                self._connection.send(messages)

    def _hear(self) -> None:
        """Take one answer of the process. An end without one is an error."""
        try:
            answer: Answer = self._connection.recv()
        except GONE:
            code = self._end()
            self._error = RunFailed(
                "the writing process has ended",
                place=f"process {self.pid}",
                found=f"signal {-code}" if code < 0 else f"exit code {code}",
                fix="see whether the system ran out of memory; published parts are kept, and the same command continues",
            )
            return
        self._counts = answer.counts
        if answer.released is not None:
            self._offered.pop(answer.released)()
        self._closed = answer.closed
        if answer.error is not None:
            self._error = rebuild(answer.error)

    def _end(self) -> int:
        """Wait for the end of a process that has said its last; its exit code."""
        try:
            return self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
