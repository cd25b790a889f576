"""The worker's answers, without an engine: what `dflash_commit` says of rows that are late, short, odd or right."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.vllm  # needs vLLM installed; starts no engine

KEY = bytes(range(16)).hex()
IDS = np.array([5, 6, 7], np.int32)


@pytest.fixture
def worker(write_cache: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """worker(rows, token_ids) -> the extension of a worker that has gathered so many rows of that document."""
    from dflash_cache.extract import connector as module
    from dflash_cache.extract.intake import Intake

    def build(rows: int | None, token_ids: list[int] | None = None) -> Any:
        import torch

        cache, spec, _ = write_cache(lengths=(4,))
        states = torch.arange((rows or 0) * 4 * spec.hidden_size).reshape(-1, 4, spec.hidden_size).to(torch.bfloat16)
        gathered = {} if rows is None else {KEY: module.Rows(token_ids or IDS.tolist(), states, None)}
        fake = SimpleNamespace(rows=gathered, intake=Intake(cache, 1), feature_columns=[0, 1, 2], verifier_column=3)
        monkeypatch.setattr(module, "_connector", lambda: fake)
        return module.WorkerExtension(), cache

    return build


def document(ids: np.ndarray = IDS) -> list[Any]:
    return [KEY, ids.tobytes(), np.ones(len(ids), np.uint8).tobytes(), "d.jsonl", 3, 9, -1]


def test_rows_that_are_not_gathered_yet_are_waited_for(worker: Any):
    extension, _ = worker(None)
    assert extension.dflash_commit([document()])["results"] == [["waiting", "", b""]]


def test_complete_rows_are_stored_and_the_last_verifier_row_comes_back(worker: Any):
    extension, cache = worker(3)
    ((status, reason, row),) = extension.dflash_commit([document()])["results"]
    assert (status, reason) == ("stored", "")
    assert (np.frombuffer(row, np.uint16).astype(np.uint32) << 16).view(np.float32).tolist() == [float(value) for value in range(88, 96)]
    answer = extension.dflash_close(True)
    assert answer["error"] is None
    assert answer["counts"]["tokens"] == 3
    assert Path(cache / "parts" / "00000000-0001").is_dir()


@pytest.mark.parametrize("rows", [2, 4])
def test_too_few_or_too_many_rows_are_rejected_never_padded_or_trimmed(worker: Any, rows: int):
    extension, _ = worker(rows)
    assert extension.dflash_commit([document()])["results"][0][:2] == ["rejected", f"the engine gave {rows} rows for 3 tokens"]


def test_rows_of_other_tokens_are_rejected(worker: Any):
    extension, _ = worker(3, [5, 6, 8])
    assert extension.dflash_commit([document()])["results"][0][:2] == ["rejected", "the engine computed other tokens than it was given"]


def test_one_token_more_than_was_fed_is_rejected_with_both_lengths(worker: Any):
    extension, _ = worker(4, [5, 6, 7, 2])
    assert extension.dflash_commit([document()])["results"][0][:2] == ["rejected", "the engine gave 4 rows for 3 tokens"]


def test_an_error_of_the_writer_comes_back_as_data(worker: Any, monkeypatch: pytest.MonkeyPatch):
    import errno

    from dflash_cache.common.errors import DiskFull
    from dflash_cache.extract.remote_errors import rebuild

    def no_space(self: object, sample: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    extension, _ = worker(3)
    monkeypatch.setattr("dflash_cache.extract.part.PartBuilder.add", no_space)
    extension.dflash_commit([document()])
    error = rebuild(extension.dflash_close(True)["error"])
    assert type(error) is DiskFull
    assert "Disk quota exceeded" in str(error)


@pytest.mark.parametrize(("rank", "writes"), [(0, True), (1, False), (3, False)])
def test_of_an_engine_with_tensor_parallelism_only_the_first_rank_writes(write_cache: Any, monkeypatch: pytest.MonkeyPatch, rank: int, writes: bool):
    import torch
    from vllm.distributed import parallel_state

    from dflash_cache.extract import connector as module

    cache, _, _ = write_cache(lengths=(4,))
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: rank)
    fake = module.CacheConnector.__new__(module.CacheConnector)
    fake._cache, fake._writer_id, fake.intake = cache, 5, None
    fake.register_kv_caches({f"model.{module.CACHE_LAYER}.0": torch.zeros(2, dtype=torch.bfloat16)})
    monkeypatch.setattr(module, "_connector", lambda: fake)
    assert (fake.intake is not None) == writes
    answer = module.WorkerExtension().dflash_close(True)
    assert (answer is not None) == writes
