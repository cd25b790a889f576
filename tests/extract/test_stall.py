"""A request that never ends is named after `stall_seconds`; one that is only slow is waited for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
from fake_engine import FakeEngine

from dflash_cache.common.errors import RunFailed
from dflash_cache.extract import run as run_module
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.engine import Document, Outcome
from dflash_cache.extract.run import run
from dflash_cache.extract.stall import SIGNAL, InFlight, Watchdog, name_documents

ROWS = [tiny.chat(f"question {number}", "answer " * (number + 1)) for number in range(6)]


class Stuck(FakeEngine):
    """Takes four documents, answers two, and is silent."""

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        self.taken = [next(iter(documents)) for _ in range(4)]
        yield [self._store(document) for document in self.taken[:2]]
        threading.Event().wait()


def settings(model: Path, folder: Path, **fields: Any) -> ExtractConfig:
    data = tiny.write_jsonl(folder / "data.jsonl", ROWS)
    given = {"model": str(model), "data": (str(data),), "cache": folder / "cache", "engine": "transformers", "max_length": 256}
    return ExtractConfig(**(given | fields))


def test_documents_that_never_finish_are_named_by_source_and_row(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stuck: list[Document] = []

    class Telling(Stuck):
        def _store(self, document: Document) -> Outcome:
            stuck[:] = self.taken[2:]
            return super()._store(document)

    monkeypatch.setattr(run_module, "start_engine", Telling)
    started = time.monotonic()
    with pytest.raises(RunFailed, match="no document has finished for") as error:
        run(settings(tiny_llama, tmp_path, stall_seconds=0.4))
    assert time.monotonic() - started < 20
    assert error.value.found == f"the oldest: {name_documents(stuck)}"
    assert error.value.problem.endswith("and 2 are being computed")
    assert list((tmp_path / "cache").glob("parts/*")) == []
    monkeypatch.setattr(run_module, "start_engine", FakeEngine)
    assert run(settings(tiny_llama, tmp_path)).samples == 6


def test_a_slow_engine_that_goes_on_answering_is_no_stall(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeEngine, "pause_seconds", 0.15)
    monkeypatch.setattr(run_module, "start_engine", FakeEngine)
    assert run(settings(tiny_llama, tmp_path, stall_seconds=0.6)).samples == 6


def test_nothing_in_flight_is_no_silence():
    in_flight = InFlight()
    time.sleep(0.01)
    assert in_flight.silent_seconds() == 0.0


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C as on a terminal, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stays_ctrl_c(interrupts: None):
    with pytest.raises(KeyboardInterrupt), Watchdog(InFlight(), 60):
        signal.raise_signal(signal.SIGINT)


def test_a_stall_is_noticed_where_interrupts_are_ignored_and_the_signal_is_given_back(interrupts: None):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = signal.getsignal(SIGNAL)
    in_flight = InFlight()
    in_flight.add(Document(b"k" * 16, "d.jsonl", 7, np.zeros(2, np.int32), np.zeros(2, np.uint8)))
    with pytest.raises(RunFailed, match="no document has finished"), Watchdog(in_flight, 0.2):
        threading.Event().wait(10)
    assert signal.getsignal(SIGNAL) == before


def test_an_engine_that_does_not_let_go_hides_no_error(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Deaf(Stuck):
        def close(self, *, publish: bool) -> Any:
            super().close(publish=publish)
            threading.Event().wait()

    monkeypatch.setattr(run_module, "CLOSE_SECONDS", 0.3)
    monkeypatch.setattr(run_module, "start_engine", Deaf)
    with pytest.raises(RunFailed, match="no document has finished"):
        run(settings(tiny_llama, tmp_path, stall_seconds=0.3))
