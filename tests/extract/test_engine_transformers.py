"""The transformers engine: the company that a document keeps changes last bits at most, and nothing is made up or left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
import torch
from safetensors.torch import load_file, save_file
from stored import Stored, read_all

from dflash_cache.common.errors import InputError, RunFailed
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.engine_transformers import TransformersEngine
from dflash_cache.extract.length_batches import BATCH_TOKENS, LOOK_AHEAD_BATCHES, length_batches
from dflash_cache.extract.plan import make_plan
from dflash_cache.extract.rejects import load_rejects
from dflash_cache.extract.run import ExtractSummary, run
from dflash_cache.train.fidelity import TeacherCheck

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(4, 300, length).tolist() for length in (50, 1, 33, 7, 33, 18, 64, 2, 41)]
Extract = Callable[..., tuple[ExtractSummary, dict[int, Stored]]]


@pytest.fixture
def extract(tmp_path: Path) -> Extract:
    """extract(target, name, documents, **fields) -> (summary, stored documents)."""

    def do(target: Path, name: str, documents: list[list[int]] = DOCUMENTS, **fields: Any) -> tuple[ExtractSummary, dict[int, Stored]]:
        data = tiny.write_jsonl(tmp_path / f"{name}.jsonl", [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in documents])
        given = {"model": str(target), "layers": (0, 2, 4), "data": (str(data),), "cache": tmp_path / name, "engine": "transformers"}
        summary = run(ExtractConfig(**(given | fields)), lambda cache: TeacherCheck(cache, device="cpu"))
        return summary, read_all(tmp_path / name)

    return do


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5", "qwen3_next", "stablelm"])
def test_neither_batch_nor_order_changes_more_than_last_bits(kind: str, extract: Extract, tmp_path: Path):
    target = tiny.build_target(tmp_path / "target", kind)
    _, alone = extract(target, "alone", batch_size=1)
    for name, documents, size in (("four", DOCUMENTS, 4), ("reversed", DOCUMENTS[::-1], 4), ("all", DOCUMENTS, 9)):
        summary, found = extract(target, name, documents, batch_size=size)
        assert (summary.samples, summary.fidelity_agreement) == (9, 1.0)
        for row, expected in alone.items():
            ours = found[row if documents is DOCUMENTS else 8 - row]
            assert ours.ids.tolist() == expected.ids.tolist()
            error = np.linalg.norm(ours.states_TCH - expected.states_TCH, axis=2) / np.linalg.norm(expected.states_TCH, axis=2)
            assert error.max() < 0.05  # of any row in any layer: bfloat16 has 8 bits


def test_the_same_command_stores_the_same_bits_in_the_same_order(tiny_llama: Path, extract: Extract):
    (_, one), (_, two) = (extract(tiny_llama, name) for name in ("one", "two"))
    assert list(one) == list(two)
    for row, found in one.items():
        assert np.array_equal(found.states_TCH, two[row].states_TCH)


def test_batches_hold_every_document_once_and_little_padding():
    lengths = np.random.default_rng(1).integers(1, 2000, 500)
    documents = [[number] * int(length) for number, length in enumerate(lengths)]
    batches = list(length_batches(documents, 8, seed=0))
    assert sorted(document[0] for batch in batches for document in batch) == list(range(500))
    assert max(len(batch) for batch in batches) == 8
    as_they_come = sum(8 * int(lengths[start : start + 8].max()) for start in range(0, 500, 8))
    padded = sum(len(batch) * max(map(len, batch)) for batch in batches)
    assert padded < 1.1 * lengths.sum()
    assert as_they_come > 1.7 * lengths.sum()
    assert max(len(batch) * max(map(len, batch)) for batch in batches if len(batch) > 1) <= BATCH_TOKENS
    assert [len(batch[0]) for batch in batches] != sorted(len(batch[0]) for batch in batches)
    assert batches == list(length_batches(documents, 8, seed=0)) != list(length_batches(documents, 8, seed=1))


def test_a_document_over_the_limit_of_a_batch_is_a_batch_of_its_own():
    long, short = [0] * (BATCH_TOKENS + 1), [1] * 10
    assert sorted(map(len, length_batches([long, short, long], 8, seed=0))) == [1, 1, 1]
    assert list(length_batches([], 8, seed=0)) == []


def test_no_more_documents_are_taken_than_are_looked_ahead():
    taken = []
    batches = length_batches(([taken.append(number)] for number in range(10_000)), 4, seed=0)
    next(batches)
    assert len(taken) == 4 * LOOK_AHEAD_BATCHES


def test_cache_json_is_the_same_whichever_engine_but_for_its_name_and_version(tiny_llama: Path, tmp_path: Path):
    data = tiny.write_jsonl(tmp_path / "data.jsonl", [tiny.chat("question", "answer")])
    given = {"model": str(tiny_llama), "data": (str(data),), "cache": tmp_path / "cache"}
    one, two = (make_plan(ExtractConfig(**given, engine=engine)).spec.model_dump(mode="json") for engine in ("vllm", "transformers"))
    for document in (one, two):
        document["fingerprint"] = document["provenance"]["created_at"] = document["settings"]["engine"] = None
    assert json.dumps(one) == json.dumps(two)


def test_weights_that_would_be_made_up_are_refused(tiny_llama: Path, extract: Extract, tmp_path: Path):
    folder = tiny.build_target(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="lack tensors of the model") as caught:
        extract(folder, "cache")
    assert "model.layers.3.mlp.up_proj.weight" in str(caught.value)


def test_a_document_longer_than_the_model_takes_is_rejected_and_listed(extract: Extract, tmp_path: Path):
    target = tiny.build_target(tmp_path / "target", max_position_embeddings=40)
    summary, stored = extract(target, "cache")
    assert (summary.samples, summary.rejects) == (6, 3)
    assert sorted(stored) == [1, 2, 3, 4, 5, 7]
    assert sorted(reject.reason for reject in load_rejects(tmp_path / "cache"))[0] == "it has 41 tokens; this model takes 40"


def test_a_model_that_computes_all_logits_predicts_the_same(tiny_llama: Path, extract: Extract, monkeypatch: pytest.MonkeyPatch):
    _, expected = extract(tiny_llama, "kept")
    real = TransformersEngine.__init__

    def without(self: TransformersEngine, job: Any) -> None:
        real(self, job)
        self._keeps_logits = False

    monkeypatch.setattr(TransformersEngine, "__init__", without)
    _, found = extract(tiny_llama, "all")
    assert {row: document.top1 for row, document in found.items()} == {row: document.top1 for row, document in expected.items()}


def test_a_batch_that_does_not_fit_is_computed_in_halves(tiny_llama: Path, extract: Extract, monkeypatch: pytest.MonkeyPatch):
    _, expected = extract(tiny_llama, "alone", batch_size=1)
    real, sizes = TransformersEngine._forward, []

    def forward(self: TransformersEngine, fed: list[np.ndarray]) -> Any:
        sizes.append(len(fed))
        if len(fed) > 1:
            raise torch.OutOfMemoryError
        return real(self, fed)

    monkeypatch.setattr(TransformersEngine, "_forward", forward)
    _, found = extract(tiny_llama, "halves", batch_size=9)
    assert sizes[:4] == [9, 4, 2, 1]
    for row, document in expected.items():
        assert np.array_equal(found[row].states_TCH, document.states_TCH)


def test_a_document_that_no_memory_holds_ends_the_run_and_names_its_length(tiny_llama: Path, extract: Extract, monkeypatch: pytest.MonkeyPatch):
    def forward(self: TransformersEngine, fed: list[np.ndarray]) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(TransformersEngine, "_forward", forward)
    with pytest.raises(RunFailed, match=r"does not hold a document of \d+ tokens"):
        extract(tiny_llama, "cache")


def test_blocks_that_give_no_state_a_token_are_refused():
    engine = TransformersEngine.__new__(TransformersEngine)
    engine.job = SimpleNamespace(target=SimpleNamespace(name="x", spec=SimpleNamespace(hidden_size=8)))  # type: ignore[assignment]
    engine._check_shapes({1: torch.zeros(2, 5, 8)}, (2, 5))
    with pytest.raises(InputError, match="block 1 gives no state") as caught:
        engine._check_shapes({1: torch.zeros(4, 2, 5, 8)}, (2, 5))
    assert "[4, 2, 5, 8]" in str(caught.value)
