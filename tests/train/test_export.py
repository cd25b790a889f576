"""The exported folder: every field that an engine reads, both places equal, tensors as said, and back again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rows import tiny_drafter
from safetensors.torch import load_file, save_file

from dflash_cache.common.errors import DflashError, InputError
from dflash_cache.train import checkpoint
from dflash_cache.train.checkpoint import CheckpointState
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.export import export, load_drafter
from dflash_cache.train.serving_config import drafter_from_config, serving_config


def saved(run: Path, **changes) -> Path:
    drafter = tiny_drafter(**changes)
    checkpoint.save(run, CheckpointState(step=3, epoch=0, row=3, config=TrainConfig(), drafter=drafter.spec), drafter.state_dict(), {}, 2)
    return run


def exported(tmp_path: Path, **changes) -> Path:
    export(saved(tmp_path / "run", **changes), tmp_path / "drafter", dtype="float32")
    return tmp_path / "drafter"


def test_the_config_holds_what_every_engine_reads(tmp_path: Path):
    config = json.loads((exported(tmp_path) / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["mask_token_id"] == config["dflash_config"]["mask_token_id"] == 3
    assert config["target_layer_ids"] == config["dflash_config"]["target_layer_ids"] == [1, 2, 4]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["num_target_layers"] == 6
    assert config["vocab_size"] == 32
    assert config["layer_types"] == ["full_attention"] * 2
    assert (config["tie_word_embeddings"], config["is_causal"], config["use_sliding_window"]) == (False, False, False)
    assert not [key for key in json.dumps(config).split('"') if "mrope" in key or "partial_rotary" in key]


def test_sliding_layers_are_stated_and_their_causality_left_to_the_layer_types(tmp_path: Path):
    kinds = ("sliding_attention", "full_attention")
    config = json.loads((exported(tmp_path, layer_types=kinds, sliding_window=5) / "config.json").read_text())
    assert config["layer_types"] == list(kinds)
    assert (config["sliding_window"], config["use_sliding_window"]) == (5, True)
    assert "is_causal" not in config


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tensors_have_the_type_that_the_config_says_and_no_others_are_there(tmp_path: Path, dtype: str):
    export(saved(tmp_path / "run"), tmp_path / "drafter", dtype=dtype)
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["dtype"] == dtype
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert set(tensors) == set(tiny_drafter().state_dict())
    assert len(tensors) == 25


def test_float32_comes_back_bit_identical_and_bfloat16_rounded_once(tmp_path: Path):
    original = tiny_drafter().state_dict()
    exact = load_drafter(exported(tmp_path))
    assert all(torch.equal(tensor, original[name]) for name, tensor in exact.state_dict().items())
    export(tmp_path / "run", tmp_path / "half")
    half = load_drafter(tmp_path / "half")
    assert half.spec == exact.spec == load_drafter(tmp_path / "run").spec
    assert all(torch.equal(tensor, original[name].bfloat16().float()) for name, tensor in half.state_dict().items())


SPECS = [{}, {"block_size": 16}, {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9}, {"logit_softcap": 30.0, "logit_scale": 0.5}]


@pytest.mark.parametrize("changes", SPECS)
def test_the_config_and_the_spec_say_the_same(changes: dict):
    spec = tiny_drafter(**changes).spec
    assert drafter_from_config(json.loads(json.dumps(serving_config(spec, "bfloat16"))), "x") == spec


def test_the_readme_gives_block_size_minus_1_to_vllm_and_the_block_size_to_sglang(tmp_path: Path):
    text = (exported(tmp_path, block_size=16) / "README.md").read_text()
    assert '"num_speculative_tokens": 15' in text
    assert "--speculative-num-draft-tokens 16" in text


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        if value is None:
            del config[name]
        else:
            config[name] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["block_size", "mask_token_id"])
def test_a_config_that_says_two_different_things_is_refused(tmp_path: Path, name: str):
    folder = exported(tmp_path)
    change_config(folder, **{name: 7})
    with pytest.raises(InputError, match=f"two different things of {name}"):
        load_drafter(folder)


@pytest.mark.parametrize("name", ["architectures", "num_target_layers", "hidden_size", "head_dim", "vocab_size", "rms_norm_eps"])
def test_a_config_without_a_needed_field_is_refused(tmp_path: Path, name: str):
    folder = exported(tmp_path)
    change_config(folder, **{name: None})
    with pytest.raises(InputError):
        load_drafter(folder)


def test_folders_with_their_fields_in_one_place_only_are_read(tmp_path: Path):
    folder = exported(tmp_path)
    change_config(folder, block_size=None, mask_token_id=None, target_layer_ids=None)
    assert load_drafter(folder).spec.block_size == 4
    change_config(folder, block_size=4, mask_token_id=3, target_layer_ids=[1, 2, 4], dflash_config=None)
    assert load_drafter(folder).spec.mask_token_id == 3


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "prefix"])
def test_tensors_that_are_not_the_drafters_are_refused(tmp_path: Path, change: str):
    folder = exported(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.pop("fc.weight")
    others = {
        "missing": {},
        "extra": {"fc.weight": weight, "x": weight.clone()},
        "shape": {"fc.weight": weight[:, :16].clone()},
        "prefix": {"model.fc.weight": weight},
    }
    tensors |= others[change]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match="tensors are not those"):
        load_drafter(folder)


def test_a_destination_that_holds_something_is_left_alone(tmp_path: Path):
    saved(tmp_path / "run")
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "mine").write_text("x")
    with pytest.raises(InputError, match="holds something already"):
        export(tmp_path / "run", tmp_path / "drafter")
    assert [path.name for path in (tmp_path / "drafter").iterdir()] == ["mine"]


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path):
    drafter = tiny_drafter()
    drafter.norm.weight.data[3] = float("nan")
    checkpoint.save(tmp_path, CheckpointState(step=1, epoch=0, row=0, config=TrainConfig(), drafter=drafter.spec), drafter.state_dict(), {}, 2)
    with pytest.raises(DflashError, match="not finite"):
        export(tmp_path, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_a_folder_without_drafter_is_a_user_error(tmp_path: Path):
    with pytest.raises(InputError, match="holds no drafter"):
        load_drafter(tmp_path)


def test_tensors_of_equal_value_are_all_written(tmp_path: Path):
    drafter = tiny_drafter()
    drafter.layers[1].load_state_dict(drafter.layers[0].state_dict())
    checkpoint.save(
        tmp_path / "run", CheckpointState(step=1, epoch=0, row=0, config=TrainConfig(), drafter=drafter.spec), drafter.state_dict(), {}, 2
    )
    export(tmp_path / "run", tmp_path / "drafter", dtype="float32")
    assert set(load_file(tmp_path / "drafter" / "model.safetensors")) == set(drafter.state_dict())


def test_an_export_leaves_nothing_behind_but_the_folder(tmp_path: Path):
    folder = exported(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "run"]
