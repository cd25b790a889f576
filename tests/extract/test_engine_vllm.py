"""The real vLLM engine on the CPU, against the transformers engine and against itself. Four engine starts in all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
from stored import Stored, read_all, relative_errors

from dflash_cache.extract import run as run_module
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.run import ExtractSummary, run

pytestmark = pytest.mark.vllm

SYSTEM = "You are a careful assistant who answers briefly. " * 2
STEP_TOKENS = 128
ROWS = [
    *(tiny.chat("q" * (number + 1), "a" * (2 * number + 1)) for number in range(13)),
    tiny.chat("first", "one", system=SYSTEM),
    tiny.chat("second", "two", system=SYSTEM),
    tiny.chat("long " * 60, "answer " * 30),
]
"""Sixteen documents of different lengths; two share a prefix of 100 tokens, one needs five steps."""


def settings(target: Path, folder: Path, name: str, **fields: Any) -> ExtractConfig:
    data = folder / "data.jsonl"
    if not data.exists():
        tiny.write_jsonl(data, ROWS)
    given = {"model": str(target), "layers": (0, 2, 4), "data": (str(data),), "cache": folder / name, "max_length": 600}
    return ExtractConfig(**(given | fields))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def reference(tiny_llama: Path, folder: Path) -> dict[int, Stored]:
    """The transformers engine, one document at a time."""
    config = settings(tiny_llama, folder, "reference", engine="transformers", batch_size=1)
    run(config)
    return read_all(config.cache)


@pytest.fixture(scope="module")
def batched(tiny_llama: Path, folder: Path, make_check: Any) -> tuple[ExtractConfig, ExtractSummary, dict[int, Stored]]:
    """vLLM, all documents at once, steps of 128 tokens."""
    config = settings(tiny_llama, folder, "batched", engine_args={"max_num_batched_tokens": STEP_TOKENS})
    summary = run(config, make_check)
    return config, summary, read_all(config.cache)


@pytest.fixture(scope="module")
def single(tiny_llama: Path, folder: Path) -> dict[int, Stored]:
    """vLLM, one document at a time, in another order."""
    config = settings(tiny_llama, folder, "single", seed=7, engine_args={"max_num_seqs": 1})
    run(config)
    return read_all(config.cache)


@pytest.fixture(scope="module")
def pressed(tiny_llama: Path, folder: Path) -> dict[int, Stored]:
    """vLLM, at most eight documents at once, in a third order, with a KV cache that holds little more than the longest one."""
    blocks = {"max_num_seqs": 8, "num_gpu_blocks_override": 32, "max_num_batched_tokens": STEP_TOKENS}
    config = settings(tiny_llama, folder, "pressed", seed=11, engine_args=blocks)
    run(config)
    return read_all(config.cache)


@pytest.fixture(scope="module")
def generated(tiny_llama: Path, folder: Path, make_check: Any) -> tuple[ExtractSummary, dict[int, Stored]]:
    """vLLM writes the answers, sampled from the two likeliest tokens."""
    config = settings(tiny_llama, folder, "generated", generate=True, max_new_tokens=8, temperature=0.7, top_k=2)
    summary = run(config, make_check)
    return summary, read_all(config.cache)


def test_every_document_is_stored_and_the_engine_predicts_from_what_is_stored(batched: Any):
    _, summary, stored = batched
    assert (summary.rows, summary.samples, summary.rejects) == (16, 16, 0)
    assert sorted(stored) == list(range(16))
    assert (summary.fidelity_samples, summary.fidelity_agreement) == (16, 1.0)


def test_states_ids_masks_and_predictions_equal_those_of_transformers(batched: Any, reference: dict[int, Stored]):
    _, _, stored = batched
    for row, expected in reference.items():
        assert stored[row].ids.tolist() == expected.ids.tolist()
        assert stored[row].mask.tolist() == expected.mask.tolist()
        assert relative_errors(stored[row].states_TCH, expected.states_TCH).max() < 0.05
        assert stored[row].next_token == -1
    assert np.mean([stored[row].top1 == reference[row].top1 for row in reference]) >= 0.9


def test_no_layer_is_taken_for_its_neighbour(batched: Any, reference: dict[int, Stored]):
    _, _, stored = batched
    ours, theirs = stored[15].states_TCH, reference[15].states_TCH
    for column in range(4):
        distances = [np.linalg.norm(ours[:, column] - theirs[:, other]) for other in range(4)]
        assert int(np.argmin(distances)) == column


def test_chunked_prefill_gives_every_row_once_and_in_order(batched: Any, reference: dict[int, Stored]):
    _, _, stored = batched
    assert len(stored[15].ids) > 4 * STEP_TOKENS
    per_row = np.linalg.norm(stored[15].states_TCH - reference[15].states_TCH, axis=2) / np.linalg.norm(reference[15].states_TCH, axis=2)
    assert per_row.max() < 0.15


def test_a_shared_prefix_has_all_its_rows_in_both_documents(batched: Any):
    _, _, stored = batched
    shared = int((stored[13].ids[:100] == stored[14].ids[:100]).sum())
    assert shared == 100
    assert len(stored[13].states_TCH) == len(stored[13].ids)
    assert len(stored[14].states_TCH) == len(stored[14].ids)
    assert relative_errors(stored[13].states_TCH[:100], stored[14].states_TCH[:100]).max() < 0.03


@pytest.mark.parametrize("other", ["single", "pressed"])
def test_neither_batch_nor_order_nor_a_full_kv_cache_changes_what_is_stored(batched: Any, other: str, request: pytest.FixtureRequest):
    """Ids and masks exactly; states to 5 %: a product of other sizes adds in another order, and each of six blocks rounds to 2^-8."""
    _, _, stored = batched
    found: dict[int, Stored] = request.getfixturevalue(other)
    assert sorted(found) == sorted(stored)
    for row, again in found.items():
        assert stored[row].ids.tolist() == again.ids.tolist()
        assert stored[row].mask.tolist() == again.mask.tolist()
        assert relative_errors(stored[row].states_TCH, again.states_TCH).max() < 0.05


def test_the_same_command_again_adds_nothing_and_starts_no_engine(batched: Any, monkeypatch: pytest.MonkeyPatch):
    config, _, stored = batched
    monkeypatch.setattr(run_module, "start_engine", lambda job: pytest.fail("the engine was started"))
    summary = run(config)
    assert (summary.samples, summary.already_stored, summary.tokens) == (0, 16, 0)
    assert len(read_all(config.cache)) == len(stored)


def test_generation_stores_prompt_and_answer_of_one_pass(generated: Any, tiny_llama: Path):
    summary, stored = generated
    assert (summary.samples, summary.fidelity_agreement) == (16, 1.0)
    tokenizer = tiny.build_tokenizer()
    for row, found in stored.items():
        messages = ROWS[row]["messages"][:-1]
        prompt = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False)["input_ids"]
        assert found.ids[: len(prompt)].tolist() == prompt
        answer = [*found.ids[len(prompt) :].tolist(), found.next_token]
        assert len(answer) == 8 or answer[-1] == 2  # full length, or ended by the target
        assert found.mask.tolist() == [0] * len(prompt) + [1] * (len(answer) - 1)
        assert len(found.states_TCH) == len(prompt) + len(answer) - 1
    sampled_differently = sum(found.next_token != found.top1 for found in stored.values())
    assert sampled_differently > 0  # at this temperature what was sampled is not always what was likeliest
    assert summary.supervised_tokens == sum(int(found.mask.sum()) + 1 for found in stored.values())


def test_generated_rows_have_the_states_of_a_second_prefill(generated: Any, tiny_llama: Path):
    import torch
    from transformers import AutoModelForCausalLM

    from dflash_cache.extract.engine_transformers import hooked

    _, stored = generated
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).eval()
    for row in (0, 5, 14):
        with torch.inference_mode(), hooked(model.model.layers, (0, 2, 4, 5)) as outputs:
            model(input_ids=torch.from_numpy(stored[row].ids.astype(np.int64))[None])
        expected = torch.stack([outputs[layer][0] for layer in (0, 2, 4, 5)], 1).float().numpy()
        assert relative_errors(stored[row].states_TCH, expected).max() < 0.05


def test_answers_are_sampled_at_the_temperature_and_from_the_tokens_that_were_asked_for(generated: Any, tiny_llama: Path):
    """vLLM's own sampler on a CPU samples at arbitrary temperatures and dies of a top-k (cpu_sampling)."""
    import torch
    from transformers import AutoModelForCausalLM

    _, stored = generated
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).eval()
    first, expected = [], []
    for found in stored.values():
        ids = [*found.ids.tolist(), found.next_token]
        with torch.inference_mode():
            logits_TV = model(torch.tensor(ids)[None]).logits[0].float()
        for place in [*np.flatnonzero(found.mask).tolist(), len(ids) - 1]:
            likely = logits_TV[place - 1].topk(2).values
            assert logits_TV[place - 1, ids[place]] > likely[1] - 0.3  # near ties aside
            first.append(bool(logits_TV[place - 1, ids[place]] == likely[0]))
            expected.append(float((likely / 0.7).softmax(0)[0]))
    chance = np.array(expected)
    assert len(chance) > 100
    assert abs(np.sum(first) - chance.sum()) < 4 * np.sqrt((chance * (1 - chance)).sum())


def test_a_failure_of_the_writer_in_the_worker_ends_the_run_as_itself():
    """Covered without an engine in test_connector.py and test_intake.py; here only that the answer is raised."""
    from dflash_cache.common.errors import DiskFull
    from dflash_cache.extract.engine_vllm import VllmEngine
    from dflash_cache.extract.remote_errors import describe

    class Answering:
        engine_core = None

        def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
            counts = {"samples": 0, "tokens": 0, "stored_bytes": 0, "parts": 0, "pending_tokens": 0}
            return [None, {"results": [], "counts": counts, "error": describe(DiskFull("could not write", place="cache"))}]

    engine = VllmEngine.__new__(VllmEngine)
    engine._engine = Answering()
    with pytest.raises(DiskFull, match="could not write"):
        engine._ask("dflash_commit", [])
