from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_target as tiny
import torch
from safetensors.torch import load_file, save_file

from dflash_cache.common.errors import InputError
from dflash_cache.extract.target import read_target, text_section
from dflash_cache.extract.target_files import write_target_files
from dflash_cache.extract.tokens import load_tokenizer


def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_sizes_norm_and_head_of_an_untied_target(tiny_llama: Path):
    target = read_target(str(tiny_llama))
    assert (target.spec.num_layers, target.spec.hidden_size, target.spec.vocab_size) == (6, 64, 320)
    assert target.spec.architecture == "LlamaForCausalLM"
    assert target.spec.final_norm == "transformers.models.llama.modeling_llama:LlamaRMSNorm"
    assert target.spec.final_norm_eps == 1e-6
    assert not target.spec.tied_embeddings
    assert (target.embedding_key, target.head_key, target.norm_keys) == (
        "model.embed_tokens.weight",
        "lm_head.weight",
        {"weight": "model.norm.weight"},
    )


def test_a_tied_target_has_no_head_of_its_own(tiny_qwen3: Path):
    target = read_target(str(tiny_qwen3))
    assert target.spec.tied_embeddings
    assert target.head_key is None
    assert target.spec.final_norm == "transformers.models.qwen3.modeling_qwen3:Qwen3RMSNorm"


def test_a_layer_norm_keeps_its_bias(tmp_path: Path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=32)).save_pretrained(tmp_path)
    target = read_target(str(tmp_path))
    assert target.spec.final_norm == "torch.nn.modules.normalization:LayerNorm"
    assert (target.spec.num_layers, target.spec.hidden_size) == (3, 16)
    assert target.norm_keys == {"weight": "transformer.ln_f.weight", "bias": "transformer.ln_f.bias"}
    assert target.embedding_key == "transformer.wte.weight"


def test_a_target_whose_sizes_stand_under_text_config(tmp_path: Path):
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {
        "vocab_size": 48,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    vision = {"depth": 4, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16, "num_position_embeddings": 16}
    config = Qwen3_5Config(text_config=text | linear, vision_config=vision, tie_word_embeddings=False)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    target = read_target(str(tmp_path))
    assert target.spec.architecture == "Qwen3_5ForConditionalGeneration"
    assert (target.spec.num_layers, target.spec.hidden_size, target.spec.vocab_size) == (4, 16, 48)
    assert target.spec.final_norm == "transformers.models.qwen3_5.modeling_qwen3_5:Qwen3_5RMSNorm"
    assert target.embedding_key == "model.language_model.embed_tokens.weight"
    assert target.norm_keys == {"weight": "model.language_model.norm.weight"}


@pytest.mark.parametrize(
    ("raw", "hidden_size"),
    [
        ({"text_config": {"hidden_size": 16}}, 16),
        ({"text_config": None, "hidden_size": 16}, 16),
        ({"text_config": {"hidden_size": 16}, "hidden_size": 99}, 16),
    ],
)
def test_the_text_section_is_text_config_unless_it_is_null(raw: dict[str, Any], hidden_size: int):
    assert text_section(raw)["hidden_size"] == hidden_size


def test_a_null_text_config_does_not_hide_the_sizes(tiny_llama: Path, tmp_path: Path):
    folder = copy(tiny_llama, tmp_path)
    edit_config(folder, text_config=None)
    assert read_target(str(folder)).spec.hidden_size == 64


def test_a_missing_folder_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no such folder"):
        read_target(str(tmp_path / "missing"))


@pytest.mark.parametrize(("missing", "problem"), [("config.json", "has no config.json"), ("model.safetensors", "has no weights")])
def test_a_folder_that_lacks_a_file_is_refused(tiny_llama: Path, tmp_path: Path, missing: str, problem: str):
    folder = copy(tiny_llama, tmp_path)
    (folder / missing).unlink()
    with pytest.raises(InputError, match=problem):
        read_target(str(folder))


def test_pickled_weights_are_refused(tiny_llama: Path, tmp_path: Path):
    folder = copy(tiny_llama, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="only there as pickles"):
        read_target(str(folder))


def test_a_cut_weights_file_is_refused(tiny_llama: Path, tmp_path: Path):
    folder = copy(tiny_llama, tmp_path)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])
    with pytest.raises(InputError, match="no whole safetensors file"):
        read_target(str(folder))


def test_an_untied_target_without_a_head_is_refused(tiny_llama: Path, tmp_path: Path):
    folder = copy(tiny_llama, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="no output head"):
        read_target(str(folder))


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


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"model.norm.weight": "../../outside.safetensors"}}', '{"weight_map": {"a": 1}}'])
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


def test_other_weights_of_the_same_shape_have_another_content_hash(tiny_llama: Path, tmp_path: Path):
    other = tiny.build_target(tmp_path / "other", seed=1)
    assert read_target(str(tiny_llama)).spec.content_hash != read_target(str(other)).spec.content_hash
    assert read_target(str(tiny_llama)).spec.content_hash == read_target(str(copy(tiny_llama, tmp_path))).spec.content_hash


def test_code_of_the_model_runs_only_when_it_is_trusted(tiny_llama: Path, tmp_path: Path):
    folder, canary = copy(tiny_llama, tmp_path), tmp_path / "canary"
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own_code.OwnConfig"})
    (folder / "own_code.py").write_text(
        f"from transformers import LlamaConfig\nopen({str(canary)!r}, 'w').close()\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    with pytest.raises(InputError, match="needs Python code of its own") as error:
        read_target(str(folder))
    assert "--trust-remote-code" in str(error.value)
    assert not canary.exists()
    with pytest.raises(InputError):  # its model class is missing; the config's code has run
        read_target(str(folder), trust_remote_code=True)
    assert canary.exists()


def test_target_files_hold_head_norm_and_token_table(tiny_llama: Path, tmp_path: Path):
    target, tokenizer = read_target(str(tiny_llama)), load_tokenizer(tiny_llama)
    write_target_files(tmp_path, target, tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]
    head = load_file(tmp_path / "target" / "head.safetensors")
    weights = load_file(tiny_llama / "model.safetensors")
    assert sorted(head) == ["embed_tokens.weight", "lm_head.weight", "norm.weight"]
    assert torch.equal(head["lm_head.weight"], weights["lm_head.weight"])
    assert torch.equal(head["norm.weight"], weights["model.norm.weight"])
    assert json.loads((tmp_path / "target" / "tokens.json").read_text()) == {
        "vocab_size": 320,
        "tokenizer_size": 260,
        "mask_token_id": None,
        "pad_token_id": 3,
        "bos_token_id": 0,
        "eos_token_ids": [2],
        "special_token_ids": [0, 1, 2, 3],
    }
    assert (tmp_path / "target" / "chat_template.jinja").read_text() == tiny.CHATML


def test_target_files_of_a_tied_target_have_no_head(tiny_qwen3: Path, tmp_path: Path):
    write_target_files(tmp_path, read_target(str(tiny_qwen3)), load_tokenizer(tiny_qwen3))
    assert sorted(load_file(tmp_path / "target" / "head.safetensors")) == ["embed_tokens.weight", "norm.weight"]


def test_target_files_appear_whole_or_not_at_all(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from dflash_cache.extract import target_files

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(target_files, "token_table", fail)
    with pytest.raises(KeyboardInterrupt):
        write_target_files(tmp_path, read_target(str(tiny_llama)), load_tokenizer(tiny_llama))
    assert list(tmp_path.iterdir()) == []
