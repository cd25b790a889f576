"""The worker's answers, without an engine: what `dflash_commit` says of rows that are late, short, odd or right."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_cache.common.errors import DflashError, DiskFull
from dflash_cache.extract.remote_errors import rebuild

pytestmark = pytest.mark.vllm  # needs vLLM installed; starts no engine

KEY = bytes(range(16)).hex()
IDS = np.array([5, 6, 7], np.int32)


@pytest.fixture
def worker(write_cache: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """worker(rows, token_ids, nan_at) -> the extension of a worker that has copied so many rows of that document, and its cache."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import extract_from_kv_cache

    from dflash_cache.extract import connector as module
    from dflash_cache.extract.intake_process import IntakeProcess
    from dflash_cache.extract.row_copies import FinishedRequest, RowCopies

    started: list[IntakeProcess] = []

    def build(rows: int | None, token_ids: list[int] | None = None, nan_at: int | None = None) -> Any:
        cache, spec, _ = write_cache(lengths=(4,))
        states = torch.arange(2 * 4 * 4 * spec.hidden_size).reshape(2, 4, 4, spec.hidden_size).to(torch.bfloat16)
        if nan_at is not None:
            states[0, nan_at, 1, 0] = float("nan")
        copies = RowCopies(states.transpose(1, 2), 4, 4, spec.hidden_size, 8, extract_from_kv_cache)
        if rows is not None:
            copies.submit([FinishedRequest("r", KEY, token_ids or IDS.tolist() + [0] * (rows - 3), rows, [0, 1])])
        started.append(IntakeProcess(cache, 1, copies.memory, 4, spec.hidden_size, [0, 1, 2], 3))
        fake = SimpleNamespace(copies=copies, intake=started[-1], feature_columns=[0, 1, 2], verifier_column=3)
        monkeypatch.setattr(module, "_connector", lambda: fake)
        return module.WorkerExtension(), cache

    yield build
    for intake in started:
        with suppress(DflashError):
            intake.close(publish=False)


def answer_of(extension: Any, ids: np.ndarray = IDS) -> list[Any]:
    """Of one document, once its rows are checked; by then nothing waits for the writer."""
    while True:
        answer = extension.dflash_commit([document(ids)])
        assert answer["error"] is None
        assert answer["held_back"] is False
        if answer["results"][0][0] != "waiting":
            return answer["results"][0]


def document(ids: np.ndarray = IDS) -> list[Any]:
    return [KEY, ids.tobytes(), np.ones(len(ids), np.uint8).tobytes(), "d.jsonl", 3, 9, -1]


def test_rows_that_are_not_copied_yet_are_waited_for(worker: Any):
    extension, _ = worker(None)
    assert extension.dflash_commit([document()])["results"] == [["waiting", "", b""]]


def test_complete_rows_are_stored_and_the_last_verifier_row_comes_back(worker: Any):
    extension, cache = worker(3)
    status, reason, row = answer_of(extension)
    assert (status, reason) == ("stored", "")
    assert (np.frombuffer(row, np.uint16).astype(np.uint32) << 16).view(np.float32).tolist() == [float(value) for value in range(88, 96)]
    answer = extension.dflash_close(True)
    assert answer["error"] is None
    assert answer["counts"]["tokens"] == 3
    assert Path(cache / "parts" / "00000000-0001").is_dir()


@pytest.mark.parametrize("rows", [2, 4])
def test_too_few_or_too_many_rows_are_rejected_never_padded_or_trimmed(worker: Any, rows: int):
    extension, _ = worker(rows)
    assert answer_of(extension)[:2] == ["rejected", f"the engine gave {rows} rows for 3 tokens"]


def test_rows_of_other_tokens_are_rejected(worker: Any):
    extension, _ = worker(3, [5, 6, 8])
    assert answer_of(extension)[:2] == ["rejected", "the engine computed other tokens than it was given"]


def test_one_token_more_than_was_fed_is_rejected_with_both_lengths(worker: Any):
    extension, _ = worker(4, [5, 6, 7, 2])
    assert answer_of(extension)[:2] == ["rejected", "the engine gave 4 rows for 3 tokens"]


def test_rows_with_a_nan_are_rejected_and_their_memory_is_given_back(worker: Any):
    from dflash_cache.extract import connector as module

    extension, cache = worker(3, nan_at=2)
    assert answer_of(extension) == ["rejected", "states are infinite or NaN, first at token 2", b""]
    assert module._connector().copies._arena.used == 0
    extension.dflash_close(True)
    assert not (cache / "parts" / "00000000-0001").exists()


FULL_DISK = """
import errno, json, sys
sys.path[:] = json.loads(sys.argv[1])
from dflash_cache.extract.part import PartBuilder
def add(self, sample):
    raise OSError(errno.EDQUOT, "Disk quota exceeded")
PartBuilder.add = add
"""


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For writing processes that are started from now on."""
    from dflash_cache.extract import intake_process

    monkeypatch.setattr(intake_process, "START", FULL_DISK + intake_process.START)


@pytest.mark.usefixtures("full_disk")
def test_an_error_of_the_writer_comes_back_as_data(worker: Any):
    extension, _ = worker(3)
    answer_of(extension)
    error = rebuild(extension.dflash_close(True)["error"])
    assert type(error) is DiskFull
    assert "Disk quota exceeded" in str(error)


@pytest.mark.usefixtures("full_disk")
def test_an_error_of_the_writer_is_told_while_its_memory_is_full_and_the_engine_gets_its_blocks_back(worker: Any):
    from dflash_cache.extract import connector as module
    from dflash_cache.extract.arena import ALIGNMENT, Arena
    from dflash_cache.extract.row_copies import FinishedRequest

    extension, _ = worker(None)
    fake, other = module._connector(), bytes(reversed(range(16))).hex()
    fake.copies._arena = Arena(ALIGNMENT)
    fake.copies.submit([FinishedRequest("r", KEY, IDS.tolist(), 3, [0, 1]), FinishedRequest("s", other, IDS.tolist(), 3, [0, 1])])
    until = time.monotonic() + 20
    while (answer := extension.dflash_commit([document()]))["results"] == [["waiting", "", b""]]:
        assert time.monotonic() < until
    assert answer["results"][0][0] == "stored"
    assert answer["held_back"]
    while (answer := extension.dflash_commit([[other, *document()[1:]]]))["error"] is None:
        assert answer["results"] == [["waiting", "", b""]]  # nothing is offered that could meet the error
        assert answer["held_back"]
        assert time.monotonic() < until
        time.sleep(0.01)
    assert type(rebuild(answer["error"])) is DiskFull
    connector = module.CacheConnector.__new__(module.CacheConnector)
    connector.copies, connector.intake, connector._landed, connector._seen_finished = fake.copies, fake.intake, set(), set()
    assert connector.get_finished({"r", "s"}) == ({"r", "s"}, None)


@pytest.mark.parametrize(("rank", "writes"), [(0, True), (1, False), (3, False)])
def test_of_an_engine_with_tensor_parallelism_only_the_first_rank_writes(write_cache: Any, monkeypatch: pytest.MonkeyPatch, rank: int, writes: bool):
    import torch
    from vllm.distributed import parallel_state

    from dflash_cache.extract import connector as module

    cache, _, _ = write_cache(lengths=(4,))
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: rank)
    fake = module.CacheConnector.__new__(module.CacheConnector)
    fake._cache, fake._writer_id, fake.intake, fake.copies, fake._landed, fake._seen_finished = cache, 5, None, None, set(), set()
    fake._block_size, fake._longest, fake.feature_columns, fake.verifier_column = 4, 8, [0, 1, 2], 3
    fake.register_kv_caches({f"model.{module.CACHE_LAYER}.0": torch.zeros(2, dtype=torch.bfloat16)})
    monkeypatch.setattr(module, "_connector", lambda: fake)
    assert (fake.intake is not None) == (fake.copies is not None) == writes
    assert fake.get_finished({"r"}) == (None, None)
    answer = module.WorkerExtension().dflash_close(True)
    assert (answer is not None) == writes
