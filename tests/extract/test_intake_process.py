"""The writing process: its parts are those of an Intake, it gives memory back, and each end of it is an error or is clean. No vLLM."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from dflash_cache.common.errors import CacheDamaged, DflashError, DiskFull, InputError, RunFailed
from dflash_cache.common.manifest import list_parts
from dflash_cache.common.sample import Sample
from dflash_cache.extract.intake import Intake
from dflash_cache.extract.intake_process import IntakeProcess
from dflash_cache.extract.intake_worker import Offer
from dflash_cache.extract.row_memory import RowMemory, attach

WIDTH, COLUMNS = 8, 4
LENGTHS = (5, 20, 16, 33, 9)


@dataclass
class Started:
    """A process, the memory it shares, and the offsets that it has given back."""

    intake: IntakeProcess
    memory: RowMemory
    released: list[int] = field(default_factory=list)
    end: int = 0

    def offer(self, sample: Sample, feature_columns: tuple[int, ...] = (0, 1, 2), verifier_column: int = 3) -> int:
        """Put its rows behind all others and offer it; its offset."""
        rows_TCH = np.zeros((len(sample), COLUMNS, WIDTH), np.uint16)
        rows_TCH[:, feature_columns], rows_TCH[:, verifier_column] = sample.hidden_states, sample.verifier_last_hidden_states
        offset = self.end
        self.memory.tensor.numpy()[offset : offset + rows_TCH.nbytes] = rows_TCH.view(np.uint8).reshape(-1)
        self.end += -(-rows_TCH.nbytes // 4096) * 4096
        ids, mask = sample.input_ids.astype(np.int32).tobytes(), sample.loss_mask.astype(np.uint8).tobytes()
        offer = Offer(offset, sample.key, sample.source, sample.source_row, ids, mask, sample.engine_top1, sample.next_token)
        self.intake.offer_checked(offer, lambda: self.released.append(offset))
        return offset


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    """start(cache): as writer 1, ended with the test."""
    started: list[IntakeProcess] = []

    def begin(cache: Path, features: tuple[int, ...] = (0, 1, 2), verifier: int = 3) -> Started:
        memory = RowMemory(1 << 20)
        intake = IntakeProcess(cache, 1, memory, COLUMNS, WIDTH, list(features), verifier)
        started.append(intake)
        return Started(intake, memory)

    yield begin
    for intake in started:
        intake._process.kill()
        intake._process.wait()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def files(part: Path) -> dict[str, bytes]:
    return {path.relative_to(part).as_posix(): path.read_bytes() for path in part.rglob("*") if path.is_file()}


@pytest.mark.parametrize("columns", [((0, 1, 2), 3), ((0, 2, 3), 1)])
def test_its_parts_are_byte_for_byte_those_of_an_intake(write_cache, start, columns):
    ours, _, samples = write_cache(LENGTHS, name="ours", part_tokens=1000)
    theirs, _, _ = write_cache(LENGTHS, name="theirs", part_tokens=1000)
    process, intake = start(ours, *columns), Intake(theirs, 1)
    for sample in samples:
        process.offer(sample, *columns)
        intake.offer(sample)
    assert process.intake.counts()["pending_tokens"] == sum(LENGTHS)
    process.intake.close(publish=True)
    intake.close(publish=True)
    assert process.intake.counts() == intake.counts()
    assert [part.name for part in list_parts(ours)] == [part.name for part in list_parts(theirs)] == ["00000000-0000", "00000000-0001"]
    assert files(list_parts(ours)[1]) == files(list_parts(theirs)[1])


def test_memory_is_given_back_once_its_rows_are_written_and_not_before(write_cache, start):
    cache, _, samples = write_cache(LENGTHS)
    before = len(list_parts(cache))
    process = start(cache)
    os.kill(process.intake.pid, signal.SIGSTOP)
    offsets = [process.offer(sample) for sample in samples]
    time.sleep(0.1)
    assert process.released == []
    os.kill(process.intake.pid, signal.SIGCONT)
    until(lambda: process.released == offsets)
    until(lambda: process.intake.counts()["parts"] == 1)  # 64 tokens; told without being asked
    assert process.intake.counts()["pending_tokens"] == sum(LENGTHS) - process.intake.counts()["tokens"]
    process.intake.close(publish=False)
    assert len(list_parts(cache)) == before + 1  # what was published stays
    assert list(cache.glob("partial/*")) == []


def test_the_seat_is_free_when_it_has_closed(write_cache, start):
    cache, _, samples = write_cache((5,))
    for _ in range(2):
        process = start(cache)
        process.offer(samples[0])
        process.intake.close(publish=False)
        assert not process.intake.failed
        process.intake.close(publish=True)  # a second close, as of a shutdown, changes nothing
    Intake(cache, 1).close(publish=True)
    assert len(list_parts(cache)) == 1


def test_what_keeps_an_intake_from_starting_is_raised_as_itself(write_cache, start, tmp_path):
    cache, _, _ = write_cache(LENGTHS)
    with pytest.raises(InputError):
        start(tmp_path / "none")
    (cache / "partial").rmdir()
    (cache / "partial").symlink_to(tmp_path)
    with pytest.raises(CacheDamaged, match="is a symbolic link"):
        start(cache)


def test_a_full_disk_is_told_without_being_asked_and_published_parts_stay(write_cache, make, start):
    cache, spec, samples = write_cache((5,))
    process = start(cache)
    resource.prlimit(process.intake.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    process.offer(make.sample(1, 2000, spec))
    until(lambda: process.intake.failed)
    with pytest.raises(DiskFull, match="File too large"):
        process.intake.check()
    with pytest.raises(DiskFull):
        process.offer(samples[0])
    with pytest.raises(DiskFull):
        process.intake.close(publish=True)
    assert len(list_parts(cache)) == 1
    assert list(cache.glob("partial/*")) == []


def test_a_process_that_is_killed_is_named_with_the_signal(write_cache, start):
    cache, _, samples = write_cache((5, 20))
    process = start(cache)
    process.offer(samples[0])
    os.kill(process.intake.pid, signal.SIGKILL)
    until(lambda: process.intake.failed)
    with pytest.raises(RunFailed, match="the writing process has ended") as caught:
        process.intake.check()
    assert caught.value.found == "signal 9"
    with pytest.raises(DflashError):
        process.offer(samples[0])
    with pytest.raises(RunFailed):
        process.intake.close(publish=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_a_run_leaves_publishing_to_the_parent(write_cache, start, number):
    cache, _, samples = write_cache((5, 20))
    process = start(cache)
    process.offer(samples[0])
    os.kill(process.intake.pid, number)
    process.intake.close(publish=True)
    assert process.intake.counts()["samples"] == 1
    assert len(list_parts(cache)) == 2


ENGINE = """
import sys, time
from pathlib import Path
from dflash_cache.extract.intake_process import IntakeProcess
from dflash_cache.extract.row_memory import RowMemory
intake = IntakeProcess(Path(sys.argv[1]), 1, RowMemory(1 << 20), 4, 8, [0, 1, 2], 3)
print(intake.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_an_engine_that_is_killed_and_the_next_one_starts(write_cache, start):
    cache, _, _ = write_cache(LENGTHS)
    with subprocess.Popen([sys.executable, "-c", ENGINE, str(cache)], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        engine.kill()
    until(lambda: not _runs(pid))
    start(cache).intake.close(publish=True)


def test_it_ends_without_its_parents_death_when_the_connection_does_and_drops_what_is_pending(write_cache, start):
    cache, _, samples = write_cache((5, 20))
    process = start(cache)
    process.offer(samples[0])
    until(lambda: process.released)
    with socket.socket(fileno=os.dup(process.intake._connection.fileno())) as connection:
        connection.shutdown(socket.SHUT_WR)
    assert process.intake._process.wait(20) == 0
    assert len(list_parts(cache)) == 1
    assert list(cache.glob("partial/*")) == []


def test_two_mappings_of_row_memory_are_the_same_bytes():
    memory = RowMemory(8192)
    memory.tensor[5000] = 7
    other = attach(memory.fd, 8192)
    assert other[5000] == 7
    other[1] = 9
    assert memory.tensor[1] == 9


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
