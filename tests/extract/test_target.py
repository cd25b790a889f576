from __future__ import annotations

import json
import shutil
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
