from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_cache.common.errors import DiskFull, InputError, RunFailed
from dflash_cache.common.manifest import list_parts
from dflash_cache.common.sample import Sample
from dflash_cache.common.spec import CacheSpec
from dflash_cache.extract import intake as intake_module
from dflash_cache.extract.intake import Intake, check_rows
from dflash_cache.extract.remote_errors import describe, rebuild
from dflash_cache.extract.writer import CacheWriter


@pytest.fixture
def cache(write_cache) -> tuple[Path, CacheSpec, list[Sample]]:
    """A cache with one part, and samples that may be offered again."""
    return write_cache(lengths=(5, 6, 7))


def test_what_is_offered_is_published_at_close(cache):
    folder, _, samples = cache
    intake = Intake(folder, writer_id=1)
    assert [intake.offer(sample) for sample in samples] == [None, None, None]
    intake.close(publish=True)
    assert intake.counts() | {"stored_bytes": 0} == {"samples": 3, "tokens": 18, "stored_bytes": 0, "parts": 1, "pending_tokens": 0}
    assert len(list_parts(folder)) == 2


def test_what_is_not_to_be_published_leaves_no_trace(cache):
    folder, _, samples = cache
    intake = Intake(folder, writer_id=1)
    intake.offer(samples[0])
    intake.close(publish=False)
    intake.close(publish=True)  # a second close, as of a shutdown, changes nothing
    assert len(list_parts(folder)) == 1
    assert list(folder.glob("partial/*")) == []


def test_one_row_too_few_is_rejected_never_padded(cache):
    _, _, samples = cache
    short = replace(samples[0], hidden_states=samples[0].hidden_states[:-1], verifier_last_hidden_states=samples[0].verifier_last_hidden_states[:-1])
    assert check_rows(short) == "the engine gave 4 rows for 5 tokens"
    longer = replace(samples[0], input_ids=samples[0].input_ids[:-1], loss_mask=samples[0].loss_mask[:-1])
    assert check_rows(longer) == "the engine gave 5 rows for 4 tokens"


@pytest.mark.parametrize("array", ["hidden_states", "verifier_last_hidden_states"])
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_states_that_are_not_finite_are_rejected(cache, array: str, bits: int):
    _, _, samples = cache
    states = getattr(samples[1], array).copy()
    states.reshape(len(states), -1)[3, 0] = bits
    assert check_rows(replace(samples[1], **{array: states})) == "states are infinite or NaN, first at token 3"


def test_a_full_disk_reaches_the_caller_as_itself_and_committed_parts_stay(cache, monkeypatch: pytest.MonkeyPatch):
    folder, _, samples = cache

    def no_space(self: object, sample: Sample) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dflash_cache.extract.part.PartBuilder.add", no_space)
    intake = Intake(folder, writer_id=1)
    intake.offer(samples[0])
    with pytest.raises(DiskFull, match="No space left on device"):
        intake.close(publish=True)
    with pytest.raises(DiskFull):
        intake.offer(samples[1])
    assert len(list_parts(folder)) == 1
    assert list(folder.glob("partial/*")) == []


def test_a_slow_writer_holds_the_engine_back(cache, monkeypatch: pytest.MonkeyPatch):
    folder, _, samples = cache
    go = threading.Event()
    real_add = CacheWriter.add

    def slow_add(self: CacheWriter, sample: Sample) -> None:
        go.wait()
        real_add(self, sample)

    monkeypatch.setattr(CacheWriter, "add", slow_add)
    monkeypatch.setattr(intake_module, "QUEUE_BYTES", 1)
    intake = Intake(folder, writer_id=1)
    intake.offer(samples[0])  # larger than the limit, yet let through alone
    blocked = threading.Thread(target=intake.offer, args=(samples[1],))
    blocked.start()
    time.sleep(0.05)
    assert blocked.is_alive()
    go.set()
    blocked.join(timeout=5)
    intake.close(publish=True)
    assert intake.counts()["samples"] == 2


def test_errors_cross_between_processes_as_themselves():
    full = rebuild(describe(DiskFull("could not write", place="c", found=3, expected="space", fix="free some")))
    assert type(full) is DiskFull
    assert str(full) == str(DiskFull("could not write", place="c", found=3, expected="space", fix="free some"))
    assert type(rebuild(describe(InputError("p")))) is InputError
    other = rebuild(describe(ValueError("odd")))
    assert type(other) is RunFailed
    assert "ValueError: odd" in str(other)


def test_states_of_a_view_are_stored_as_they_are(cache):
    folder, spec, samples = cache
    both = np.concatenate([samples[0].hidden_states, samples[0].verifier_last_hidden_states[:, None]], axis=1)
    intake = Intake(folder, writer_id=1)
    intake.offer(replace(samples[0], hidden_states=both[:, : len(spec.layer_ids)], verifier_last_hidden_states=both[:, -1]))
    intake.close(publish=True)
    assert intake.counts()["tokens"] == 5
