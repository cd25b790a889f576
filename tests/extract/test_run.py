"""The order of things and the accounts, with the transformers engine and with engines that fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
import zarr

from dflash_cache.common.errors import DiskFull, InputError, RunFailed
from dflash_cache.common.manifest import list_parts
from dflash_cache.extract import run as run_module
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.engine import Document, EngineJob, Outcome, WriterCounts
from dflash_cache.extract.engine_transformers import TransformersEngine
from dflash_cache.extract.estimate import estimate
from dflash_cache.extract.rejects import load_rejects
from dflash_cache.extract.run import run

ROWS = [tiny.chat(f"question {number}", "answer " * (number + 1)) for number in range(6)]
Settings = Callable[..., ExtractConfig]


@pytest.fixture
def settings(tiny_llama: Path, tmp_path: Path) -> Settings:
    """settings(rows, **fields) -> a config of the transformers engine."""

    def build(rows: list[object] | None = None, **fields: Any) -> ExtractConfig:
        data = tiny.write_jsonl(tmp_path / "data.jsonl", ROWS if rows is None else rows)
        given = {"model": str(tiny_llama), "data": (str(data),), "cache": tmp_path / "cache", "engine": "transformers", "max_length": 256}
        return ExtractConfig(**(given | fields))

    return build


def stored_rows(cache: Path) -> list[int]:
    return [int(row) for part in list_parts(cache) for row in zarr.open_group(part, mode="r")["source_row"][:]]


def test_every_row_is_stored_once_and_fidelity_is_complete(settings: Settings, make_check: Any):
    config = settings()
    summary = run(config, make_check)
    assert (summary.rows, summary.samples, summary.rejects, summary.already_stored, summary.parts) == (6, 6, 0, 0, 1)
    assert sorted(stored_rows(config.cache)) == [0, 1, 2, 3, 4, 5]
    assert (summary.fidelity_samples, summary.fidelity_agreement) == (6, 1.0)
    assert summary.tokens == sum(int(zarr.open_group(part, mode="r")["sample_offsets"][-1]) for part in list_parts(config.cache))
    assert summary.layer_ids == (1, 2, 3)


def test_the_order_of_samples_is_shuffled_by_the_seed(settings: Settings, tmp_path: Path):
    orders = []
    for seed, name in ((0, "a"), (0, "b"), (3, "c")):
        run(settings(seed=seed, cache=tmp_path / name))
        orders.append(stored_rows(tmp_path / name))
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_the_same_command_again_adds_nothing_and_starts_no_engine(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    config = settings([*ROWS, "broken"])
    run(config)
    rejects = (config.cache / "rejects.jsonl").read_text()
    monkeypatch.setattr(run_module, "start_engine", lambda job: pytest.fail("the engine was started"))
    summary = run(config)
    assert (summary.rows, summary.samples, summary.already_stored, summary.rejects, summary.tokens) == (7, 0, 6, 1, 0)
    assert (config.cache / "rejects.jsonl").read_text() == rejects
    assert len(list_parts(config.cache)) == 1


def test_more_rows_continue_the_cache(settings: Settings):
    run(settings(limit=2))
    summary = run(settings())
    assert (summary.samples, summary.already_stored) == (4, 2)
    assert sorted(stored_rows(settings().cache)) == [0, 1, 2, 3, 4, 5]


def test_rejected_rows_are_counted_and_listed_and_the_others_are_stored(settings: Settings):
    long = tiny.chat("hi", "y" * 300)
    rows = [ROWS[0], "", "{broken", long, ROWS[0], {"messages": None}, ROWS[1], {"messages": [{"role": "system", "content": "s"}]}]
    with pytest.raises(InputError, match="6 of 8 cannot be used"):
        run(settings(rows))
    assert not settings(rows).cache.exists()
    config = settings(rows, max_rejects=1)
    summary = run(config)
    assert (summary.rows, summary.samples, summary.rejects) == (8, 2, 6)
    listed = {reject.row: reject.reason for reject in load_rejects(config.cache)}
    assert listed[1] == "the line is empty"
    assert listed[2].startswith("the line is not valid JSON")
    assert listed[3].endswith("tokens; the limit is 256")
    assert listed[4] == "duplicate of row 0"
    assert listed[5] == "`messages` is null"
    assert listed[7] == "the conversation has no user turn"


def test_when_every_row_is_rejected_the_reasons_are_told_and_nothing_is_written(settings: Settings):
    config = settings(["", "", {"nothing": 1}])
    with pytest.raises(InputError, match="none of the 3 rows can be used") as error:
        run(config)
    assert "2 x the line is empty" in str(error.value)
    assert not config.cache.exists()


def test_generated_answers_are_stored_as_the_target_wrote_them(settings: Settings, make_check: Any):
    config = settings(generate=True, max_new_tokens=5)
    summary = run(config, make_check)
    group = zarr.open_group(list_parts(config.cache)[0], mode="r")
    ids, mask, offsets = (np.asarray(group[name][:]) for name in ("input_ids", "loss_mask", "sample_offsets"))
    for sample, (start, end) in enumerate(pairwise(offsets)):
        prompt = int((mask[start:end] == 0).sum())
        assert mask[start:end].tolist() == [0] * prompt + [1] * (end - start - prompt)
        assert 1 <= end - start - prompt + 1 <= 5
        assert group["next_token"][sample] == group["engine_top1"][sample]  # greedy
        assert ids[start + prompt - 1] == tiny.build_tokenizer()("\n")["input_ids"][0]  # the prompt ends with the generation prompt
    assert summary.fidelity_agreement == 1.0
    assert summary.supervised_tokens == int(mask.sum()) + 6
    assert json.loads((config.cache / "cache.json").read_text())["settings"]["generation"] == {"max_new_tokens": 5, "temperature": 0.0, "seed": 0}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"layers": (1, 6)}, "the target has blocks 0..5, not 6"),
        ({"layers": (-1, 2)}, "the target has blocks 0..5, not -1"),
        ({"layers": (1, 1, 2)}, "given more than once: 1"),
        ({"verifier_layer": 4}, "from another they would be wrong in silence"),
        ({"verifier_layer": 6, "force_verifier_layer": True}, "no such block"),
        ({"model": "./missing"}, "no such folder"),
        ({"data": ("missing.jsonl",)}, "no such file"),
        ({"engine_args": {"seed": 1}}, "is for --engine vllm only"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(settings: Settings, fields: dict[str, Any], problem: str):
    config = settings(**fields)
    with pytest.raises(InputError, match=problem):
        run(config)
    assert not config.cache.exists()


def test_a_cache_of_other_settings_is_refused_naming_them(settings: Settings):
    run(settings())
    with pytest.raises(InputError) as error:
        run(settings(layers=(0, 1), max_length=128))
    assert "features.layer_ids: the cache has [1, 2, 3], this run has [0, 1]" in str(error.value)
    assert "text.max_length: the cache has 256, this run has 128" in str(error.value)


def test_a_folder_that_is_no_cache_is_refused_untouched(settings: Settings):
    config = settings()
    config.cache.mkdir()
    (config.cache / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="is not empty and is no feature cache"):
        run(config)
    assert [path.name for path in config.cache.iterdir()] == ["thesis.tex"]


def test_two_extractions_into_one_cache_exclude_each_other(settings: Settings):
    config = settings()
    run(config)
    with run_module.only_writer(config.cache), pytest.raises(InputError, match="another extraction is writing into it"):
        run(config)


def test_a_forced_verifier_layer_is_caught_by_fidelity(settings: Settings, make_check: Any):
    config = settings(verifier_layer=2, force_verifier_layer=True, min_samples=4)
    with pytest.raises(RunFailed, match="samples disagree"):
        run(config, make_check)
    assert list_parts(config.cache) == []
    assert list(config.cache.glob("partial/*")) == []


class Failing(TransformersEngine):
    """Stores one batch, then fails."""

    error: BaseException = RunFailed("the engine died")

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        yield next(super().run(documents))
        raise self.error


@pytest.mark.parametrize("error", [RunFailed("the engine died"), DiskFull("no space"), KeyboardInterrupt()])
def test_a_run_that_fails_half_way_keeps_published_parts_and_the_next_one_completes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    monkeypatch.setattr(Failing, "error", error)
    config = settings(part_tokens=1, batch_size=2)
    monkeypatch.setattr(run_module, "start_engine", lambda job: Failing(job))
    with pytest.raises(type(error)):
        run(config)
    kept = len(list_parts(config.cache))
    assert list(config.cache.glob("partial/*")) == []
    monkeypatch.undo()
    summary = run(config)
    assert summary.already_stored == kept
    assert sorted(stored_rows(config.cache)) == [0, 1, 2, 3, 4, 5]


class Losing:
    """An engine that says nothing of its last document."""

    def __init__(self, job: EngineJob) -> None:
        self.real = TransformersEngine(job)

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        return self.real.run(list(documents)[:-1])

    def counts(self) -> WriterCounts:
        return self.real.counts()

    def close(self, *, publish: bool) -> WriterCounts:
        return self.real.close(publish=publish)


def test_a_document_that_the_engine_loses_fails_the_run(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_module, "start_engine", lambda job: Losing(job))
    with pytest.raises(RunFailed, match="the accounts do not add up"):
        run(settings())


def test_estimate_counts_what_run_stores_and_writes_nothing(settings: Settings):
    config = settings()
    guess = estimate(config)
    assert not config.cache.exists()
    summary = run(config)
    assert (guess.rows, guess.samples, guess.tokens, guess.supervised_tokens) == (6, 6, summary.tokens, summary.supervised_tokens)
    assert guess.raw_bytes == summary.tokens * 4 * 64 * 2
    assert guess.stored_bytes == round(guess.raw_bytes * 0.69)
    assert guess.parts == 1


def test_estimate_of_generation_is_an_upper_bound(settings: Settings):
    config = settings(generate=True, max_new_tokens=5)
    assert estimate(config).supervised_tokens == 6 * 5
    assert estimate(config).tokens >= run(config).tokens


def test_batches_do_not_change_what_is_stored(settings: Settings, tmp_path: Path):
    for batch_size in (1, 6):
        run(settings(batch_size=batch_size, cache=tmp_path / str(batch_size)))
    one, six = (zarr.open_group(list_parts(tmp_path / name)[0], mode="r") for name in ("1", "6"))
    assert np.array_equal(one["engine_top1"][:], six["engine_top1"][:])
    assert np.array_equal(one["input_ids"][:], six["input_ids"][:])
    differing = one["hidden_states/exponent"][:] != six["hidden_states/exponent"][:]
    assert differing.mean() < 0.02  # padding changes the last bits of a bfloat16
