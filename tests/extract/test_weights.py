"""What the weights hold against what the config says of them: heads tied or not, quantised parts, an index that leads astray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_target as tiny
import torch
from safetensors.torch import load_file, save_file
from test_target import copy, edit_config

from dflash_cache.common.errors import InputError
from dflash_cache.extract.target import read_target
from dflash_cache.extract.target_files import write_target_files
from dflash_cache.extract.tokens import load_tokenizer


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_head(weight: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = weight(tensors["model.embed_tokens.weight"])

    return change


def test_a_head_that_is_stored_though_the_config_says_tied_is_not_dropped(tiny_qwen3: Path, tmp_path: Path):
    """As both engines do: a copy of the embedding is the embedding, another head is the model's own."""
    from transformers import AutoModelForCausalLM

    folder = copy(tiny_qwen3, tmp_path)
    change_weights(folder, with_head(torch.clone))
    assert (read_target(str(folder)).head_key, read_target(str(folder)).spec.tied_embeddings) == (None, True)
    change_weights(folder, with_head(lambda embedding: embedding.flip(0)))
    target = read_target(str(folder))
    assert (target.head_key, target.spec.tied_embeddings) == ("lm_head.weight", False)
    write_target_files(tmp_path, target, load_tokenizer(folder))
    stored = load_file(tmp_path / "target" / "head.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(stored["lm_head.weight"], model.lm_head.weight)
    assert torch.equal(stored["embed_tokens.weight"], model.model.embed_tokens.weight)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_heads_are_compared_to_the_last_row(tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from dflash_cache.extract import weights

    monkeypatch.setattr(weights, "COMPARED_ROWS", 100)
    folder = copy(tiny_qwen3, tmp_path)

    def last_differs(embedding: torch.Tensor) -> torch.Tensor:
        head = embedding.clone()
        head[-1, -1] += 1
        return head

    change_weights(folder, with_head(last_differs))
    assert not read_target(str(folder)).spec.tied_embeddings


def quantise(tensors: dict[str, torch.Tensor], parts: tuple[str, ...]) -> None:
    """In the manner of fp8 checkpoints: the weight in 8 bits beside its scale."""
    for name in [name for name in tensors if name.endswith("_proj.weight") or name in parts]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[name.removesuffix("weight") + "weight_scale_inv"] = torch.ones(1)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
    ],
    ids=lambda config: config["quant_method"],
)
def test_quantised_blocks_are_allowed_and_recorded(tiny_llama: Path, tmp_path: Path, config: dict[str, Any]):
    folder = copy(tiny_llama, tmp_path)
    edit_config(folder, quantization_config=config)
    change_weights(folder, lambda tensors: quantise(tensors, ()))
    target = read_target(str(folder))
    assert target.spec.quantization == config["quant_method"]
    write_target_files(tmp_path, target, load_tokenizer(folder))
    assert {tensor.dtype for tensor in load_file(tmp_path / "target" / "head.safetensors").values()} == {torch.bfloat16}


def test_a_quantised_head_is_refused_before_a_row_is_read(tiny_llama: Path, tmp_path: Path):
    folder = copy(tiny_llama, tmp_path)
    change_weights(folder, lambda tensors: quantise(tensors, ("lm_head.weight",)))
    with pytest.raises(InputError, match="must not be quantised"):
        read_target(str(folder))


def test_a_packed_head_is_refused_as_quantised(tiny_llama: Path, tmp_path: Path):
    folder = copy(tiny_llama, tmp_path)
    change_weights(folder, lambda tensors: tensors.update({"lm_head.qweight": tensors.pop("lm_head.weight").to(torch.int8)}))
    with pytest.raises(InputError, match="must not be quantised"):
        read_target(str(folder))


def test_a_quantised_embedding_is_refused(tiny_llama: Path, tmp_path: Path):
    folder = copy(tiny_llama, tmp_path)
    change_weights(folder, lambda tensors: quantise(tensors, ("model.embed_tokens.weight",)))
    with pytest.raises(InputError, match="must not be quantised"):
        write_target_files(tmp_path, read_target(str(folder)), load_tokenizer(folder))
    assert not (tmp_path / "target").exists()


def test_a_head_with_a_bias_is_refused(tiny_llama: Path, tmp_path: Path):
    folder = copy(tiny_llama, tmp_path)
    change_weights(folder, lambda tensors: tensors.update({"lm_head.bias": torch.zeros(320)}))
    with pytest.raises(InputError, match="head with a bias"):
        read_target(str(folder))


def test_the_head_of_gpt_neox_is_found_under_its_own_name(tmp_path: Path):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=32, **sizes)).save_pretrained(tmp_path)
    target = read_target(str(tmp_path))
    assert (target.embedding_key, target.head_key) == ("gpt_neox.embed_in.weight", "embed_out.weight")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": {"model.norm.weight": "../../outside.safetensors"}}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none_or_leads_outside_is_refused(tiny_llama: Path, tmp_path: Path, content: str):
    folder = copy(tiny_llama, tmp_path)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match="is no index of weights"):
        read_target(str(folder))


def test_a_tensor_that_only_the_index_has_is_refused(tiny_llama: Path, tmp_path: Path):
    folder = copy(tiny_llama, tmp_path)
    names = [*load_file(folder / "model.safetensors"), "lm_head.weight"]
    change_weights(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    with pytest.raises(InputError, match="lacks a tensor that the index says it has"):
        read_target(str(folder))


def test_logit_scales_multiply_or_divide_as_each_class_has_it(tmp_path: Path):
    scales = {}
    for kind, fields in (("granite", {"logits_scaling": 4.0}), ("cohere", {"logit_scale": 0.25}), ("hyperclovax", {"logits_scaling": 0.125})):
        target = tiny.build_target(tmp_path / kind, kind, tied=kind == "cohere", num_hidden_layers=1, **fields)
        scales[kind] = read_target(str(target)).spec.logit_scale
    assert scales == {"granite": 0.25, "cohere": 0.25, "hyperclovax": 0.125}
