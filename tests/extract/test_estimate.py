"""An estimate is exact for small datasets, near the truth for sampled ones, and says how near."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
import tiny_target as tiny

from dflash_cache.extract import estimate as module
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.estimate import PREFILL_FLOPS, estimate
from dflash_cache.extract.parameters import active_parameters


def config(target: Path, *data: object, **fields: object) -> ExtractConfig:
    return ExtractConfig(**{"model": str(target), "data": tuple(map(str, data)), "cache": Path("unused"), "engine": "transformers", **fields})


@pytest.fixture
def data(tmp_path):
    random.seed(0)
    rows = [tiny.chat("q" * random.randint(1, 200), "a" * random.randint(1, 200)) if number % 10 else {"x": 1} for number in range(900)]
    return tiny.write_jsonl(tmp_path / "d.jsonl", rows)


def test_a_small_dataset_is_tokenized_whole_and_the_estimate_is_exact(tiny_llama, data):
    found = estimate(config(tiny_llama, data))
    assert (found.rows, found.sampled_rows, found.samples, found.rejects, found.tokens_error) == (900, 900, 810, 90, 0)
    frame = len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n") - 3 * len("<|im_end|>") - 2 + 1
    assert 810 * frame < found.tokens < 810 * (frame + 400)


@pytest.mark.parametrize("packed", [False, True])
def test_a_sample_is_near_the_truth_by_its_own_error(tiny_llama, data, tmp_path, monkeypatch, packed):
    truth = estimate(config(tiny_llama, data))
    if packed:
        (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(data.read_bytes()))
        data = tmp_path / "d.jsonl.gz"
    monkeypatch.setattr(module, "SAMPLED_ROWS", 200)
    found = estimate(config(tiny_llama, data))
    assert (found.rows, found.sampled_rows) == (900, 200)
    assert 0 < found.tokens_error < truth.tokens / 10
    assert abs(found.tokens - truth.tokens) < 4 * found.tokens_error
    assert abs(found.rejects - 90) < 60


def test_limits_of_rows_are_kept(tiny_llama, data, tmp_path):
    other = tiny.write_jsonl(tmp_path / "e.jsonl", [tiny.chat("a", "b")] * 5)
    assert estimate(config(tiny_llama, f"{data}:20", other)).rows == 25
    assert estimate(config(tiny_llama, f"{data}:20", other, limit=22)).rows == 22
    assert estimate(config(tiny_llama, other, data, limit=3)).rows == 3


def test_hours_follow_from_the_rate_and_are_not_invented_for_generation(tiny_llama, data, monkeypatch):
    found = estimate(config(tiny_llama, data), 100.0)
    assert found.hours == pytest.approx(found.tokens / 100 / 3600)
    assert "as given" in found.to_text()
    assert estimate(config(tiny_llama, data)).tokens_per_second == module.MEASURED_RATE
    monkeypatch.setattr(module, "MEASURED_RATE", 1e30)
    assert estimate(config(tiny_llama, data)).tokens_per_second == pytest.approx(PREFILL_FLOPS / 2 / layers_of_tiny_llama())
    generated = estimate(config(tiny_llama, data, generate=True, max_new_tokens=8, max_length=1024, data_format="messages"))
    assert generated.hours is None
    assert generated.is_bound
    assert "at most" in generated.to_text()
    assert "at most" not in found.to_text()
    assert "--tokens-per-second" in generated.to_text()


def layers_of_tiny_llama() -> int:
    hidden, inner, heads, key_heads, size = tiny.HIDDEN_SIZE, 128, 2, 1, 32
    block = 2 * hidden * heads * size + 2 * hidden * key_heads * size + 3 * hidden * inner + 2 * hidden
    return tiny.NUM_LAYERS * block + hidden


def test_of_routed_experts_only_the_chosen_share_counts():
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    text = Qwen3MoeConfig(**sizes, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[], tie_word_embeddings=False)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(text)
    attention, norms, router, experts = 4 * 8 * 8, 3 * 8 + 2 * 8, 4 * 8, 4 * 3 * 8 * 16
    assert active_parameters(model, text) == attention + norms + router + experts // 2
