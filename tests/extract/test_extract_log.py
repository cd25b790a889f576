"""The log says what every run did, survives kills, and nothing but people relies on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_target as tiny
from fake_engine import FakeEngine

from dflash_cache.common.errors import RunFailed
from dflash_cache.common.progress import ProgressBar, duration
from dflash_cache.extract import meter as meter_module
from dflash_cache.extract import run as run_module
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.extract_log import ExtractLog, logged
from dflash_cache.extract.run import ExtractSummary, run
from dflash_cache.train.repair import repair
from dflash_cache.train.verify import verify

ROWS = [tiny.chat(f"question {number}", "answer " * (number + 1)) for number in range(12)]


@pytest.fixture
def extract(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ExtractSummary]:
    monkeypatch.setattr(run_module, "start_engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "pause_seconds", 0.02)  # the writer keeps up

    def build(rows: list[object], **fields: Any) -> ExtractSummary:
        data = tiny.write_jsonl(tmp_path / "data.jsonl", rows)
        given = {"model": str(tiny_llama), "data": (str(data),), "cache": tmp_path / "cache", "engine": "transformers", "max_length": 256}
        return run(ExtractConfig(**(given | {"part_tokens": 300, "chunk_tokens": 32} | fields)))

    return build


def lines(cache: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cache / "extract.log.jsonl").read_text().splitlines()]


def test_a_run_is_logged_from_its_config_to_its_summary(extract: Callable[..., ExtractSummary], tmp_path: Path):
    summary = extract([*ROWS, "broken"])
    found = lines(tmp_path / "cache")
    assert [line["event"] for line in found] == ["started", *["part"] * summary.parts, "finished"]
    assert (found[0]["config"]["part_tokens"], found[0]["documents"], found[0]["to_do"]) == (300, 12, 12)
    assert found[-1]["summary"] == json.loads(json.dumps(summary.to_dict()))
    parts = [line["published"]["parts"] for line in found[1:-1]]
    assert parts == list(range(1, summary.parts + 1))
    assert all(line["rejects"] == 1 and line["samples"] >= line["published"]["samples"] for line in found[1:-1])


def test_a_run_that_finds_nothing_to_do_is_logged_behind_the_first(extract: Callable[..., ExtractSummary], tmp_path: Path):
    extract(ROWS)
    before = lines(tmp_path / "cache")
    extract(ROWS)
    assert lines(tmp_path / "cache")[: len(before)] == before
    assert [line["event"] for line in lines(tmp_path / "cache")[len(before) :]] == ["started", "finished"]


def test_every_step_is_logged_when_its_time_has_come(extract: Callable[..., ExtractSummary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meter_module, "STEP_SECONDS", 0.0)
    extract(ROWS, part_tokens=100_000)
    assert [line["samples"] for line in lines(tmp_path / "cache") if line["event"] == "progress"] == list(range(1, 13))


def test_a_failure_is_logged_with_its_error(extract: Callable[..., ExtractSummary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(job: Any) -> None:
        raise RunFailed("the engine died", place="somewhere")

    monkeypatch.setattr(run_module, "start_engine", fail)
    with pytest.raises(RunFailed):
        extract(ROWS)
    last = lines(tmp_path / "cache")[-1]
    assert (last["event"], last["error"], last["message"]) == ("failed", "RunFailed", "somewhere: the engine died")


def test_a_line_that_a_kill_cut_off_spoils_no_other(tmp_path: Path):
    (tmp_path / "extract.log.jsonl").write_text('{"event": "started"}\n{"event": "pro')
    ExtractLog(tmp_path, rank=2).write("started", to_do=1)
    text = (tmp_path / "extract.log.jsonl").read_text().splitlines()
    assert text[:2] == ['{"event": "started"}', '{"event": "pro']
    assert {**json.loads(text[2]), "time": ""} == {"time": "", "event": "started", "rank": 2, "to_do": 1}


def test_the_error_of_the_run_is_shown_even_when_it_cannot_be_logged(tmp_path: Path):
    def fail() -> None:
        with logged(tmp_path, {}) as log:
            log.close()
            raise RunFailed("the engine died")

    with pytest.raises(RunFailed, match="the engine died"):
        fail()


def test_verification_and_repair_leave_the_log_alone(extract: Callable[..., ExtractSummary], tmp_path: Path):
    extract(ROWS)
    cache = tmp_path / "cache"
    (cache / "extract.log.jsonl").write_bytes(b"\xff no JSON")
    next((cache / "parts").iterdir()).joinpath("zarr.json").write_bytes(b"{")
    assert {problem.entry for problem in verify(cache, teacher=False).problems} == {"parts/00000000-0000"}
    assert [moved.entry for moved in repair(cache).moved] == ["parts/00000000-0000"]
    assert (cache / "extract.log.jsonl").read_bytes() == b"\xff no JSON"
    assert verify(cache, teacher=False).problems == []


def test_the_progress_line_has_samples_rate_bytes_ratio_time_left_and_rejects(
    extract: Callable[..., ExtractSummary], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dflash_cache.common.progress.LINE_SECONDS", 0.0)
    extract([*ROWS, "broken"])
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("extracting: 11/12")]
    assert " 0 s left  " in shown[0]
    for part in (" tokens/s, ", " GB written, ", " of raw, ", "1 rejected"):
        assert part in shown[0]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119.4, "119 s"), (121, "2 min"), (7140, "119 min"), (7200, "2 h 0 min"), (12_000, "3 h 20 min")]
)
def test_durations_are_short(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_bar_without_a_total_has_no_time_left(capsys: pytest.CaptureFixture[str]):
    with ProgressBar("reading", None) as bar:
        bar.update(3, "note")
    assert capsys.readouterr().err == "reading: 3 in 0 s  note\n"
