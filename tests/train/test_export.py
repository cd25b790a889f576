"""The exported folder: every field that an engine reads, both places equal, tensors as said, and back again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rows import tiny_drafter
from safetensors.torch import load_file, save_file
from tiny_run import config

from dflash_cache.cli import main
from dflash_cache.common.errors import CacheDamaged, DflashError, InputError
from dflash_cache.train import checkpoint
from dflash_cache.train import drafter as drafter_module
from dflash_cache.train import export as export_module
from dflash_cache.train.checkpoint import CheckpointState
from dflash_cache.train.config import EvalConfig, TrainConfig
from dflash_cache.train.draft_head import offsets
from dflash_cache.train.drafter_folder import fill_drafter, load_drafter
from dflash_cache.train.evaluate import evaluate
from dflash_cache.train.export import export
from dflash_cache.train.run import run
from dflash_cache.train.serving_config import drafter_from_config, serving_config
from dflash_cache.train.speculators_config import Verifier, drafter_from_speculators, speculators_config


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


@pytest.mark.parametrize(
    ("to", "problem"),
    [
        ("file/x", "lies below a file"),
        ("run/checkpoints/x", "lies inside of what is exported"),
        ("run/checkpoints/step-00000003/x", "lies inside of what is exported"),
        ("link/checkpoints/x", "lies inside of what is exported"),
        ("dangling", "is a symbolic link"),
        ("empty", "is a symbolic link"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_destination_at_which_no_folder_can_appear_is_refused_and_nothing_is_left(tmp_path: Path, to: str, problem: str):
    saved(tmp_path / "run")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "real").mkdir()
    (tmp_path / "empty").symlink_to(tmp_path / "real")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=problem):
        export(tmp_path / "run", tmp_path / to)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("record", "fits"),
    [
        ({}, True),
        ({"cache_paths": None}, False),
        ({"cache_paths": [1]}, False),
        ({"caches": [{}]}, False),
        ({"caches": 1}, False),
        ({"target": 1}, False),
    ],
)
def test_a_record_of_another_form_is_damage_with_a_way_out(tmp_path: Path, record: dict, fits: bool):
    (saved(tmp_path / "run") / "run.json").write_text(json.dumps(record))
    if fits:
        export(tmp_path / "run", None, dry_run=True)
        return
    with pytest.raises(CacheDamaged, match=r"(?s)run.json: does not say.*copy the checkpoint's folder"):
        export(tmp_path / "run", None, dry_run=True)


@pytest.mark.parametrize("line", [b"null", b"[]", b"1", b'{"step": "x", "loss": 1}', b'{"step": 3, "loss": "x", "tau": null}', b"\xff"])
def test_lines_of_metrics_that_say_nothing_are_passed_over(tmp_path: Path, line: bytes):
    run = saved(tmp_path / "run")
    (run / "run.json").write_text("{}")
    for name in ("metrics.jsonl", "eval.jsonl"):
        (run / name).write_bytes(line + b"\n")
    export(run, tmp_path / "drafter", dtype="float32")
    assert "not recorded" in (tmp_path / "drafter" / "README.md").read_text()


@pytest.mark.parametrize("kind", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_numbers_are_refused(tmp_path: Path, kind: torch.dtype):
    folder = exported(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"].to(kind)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"(?s)no plain numbers.*norm.weight"):
        load_drafter(folder)


@pytest.mark.parametrize("offsets", [[10**12] * 5, [-1, 0, 0, 0, 0], [1, 0, 0, 0, 0]])
def test_a_pruned_vocabulary_that_leads_to_no_tokens_or_twice_to_one_is_refused(tmp_path: Path, offsets: list[int]):
    drafter = tiny_drafter(draft_vocab_size=5)
    with pytest.raises(InputError, match="d2t is no mapping into the vocabulary"):
        fill_drafter(drafter.spec, {**drafter.state_dict(), "d2t": torch.tensor(offsets)}, tmp_path)


def test_the_weights_may_be_read_by_whoever_may_read_the_config(tmp_path: Path):
    folder = exported(tmp_path)
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


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


KEPT = torch.tensor([0, 3, 5, 8, 9])


def pruned_run(run: Path) -> Path:
    drafter = tiny_drafter(draft_vocab_size=5)
    drafter.d2t.copy_(offsets(KEPT))
    checkpoint.save(run, CheckpointState(step=3, epoch=0, row=3, config=TrainConfig(), drafter=drafter.spec), drafter.state_dict(), {}, 2)
    return run


def test_the_speculators_config_holds_what_vllm_and_the_library_read(tmp_path: Path, write_cache):
    cache, _, _ = write_cache()
    export(saved(tmp_path / "run"), tmp_path / "s", "float32", format="speculators", cache=cache, model="org/target")
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    own, serving = config["transformer_layer_config"], config["speculators_config"]
    assert "model_type" not in config
    assert (config["speculators_model_type"], serving["algorithm"]) == ("dflash", "dflash")
    assert config["aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert (config["block_size"], serving["proposal_methods"][0]["speculative_tokens"], config["mask_token_id"]) == (4, 3, 3)
    assert serving["verifier"] == {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    assert (config["draft_vocab_size"], config["target_hidden_size"], config["num_target_layers"]) == (32, 8, 6)
    assert (config["sliding_window_non_causal"], config["sample_from_anchor"]) == (True, False)
    assert (own["model_type"], own["hidden_size"], own["head_dim"], own["vocab_size"]) == ("qwen3", 8, 4, 32)
    assert own["rope_theta"] == own["rope_parameters"]["rope_theta"] == 10000.0
    assert own["dtype"] == config["dtype"] == "float32"


def test_the_speculators_weights_hold_the_targets_matrices_bit_for_bit(tmp_path: Path, write_cache):
    cache, _, _ = write_cache()
    target = load_file(cache / "target" / "head.safetensors")
    export(saved(tmp_path / "run"), tmp_path / "s", format="speculators", cache=cache)
    tensors = load_file(tmp_path / "s" / "model.safetensors")
    assert set(tensors) == set(tiny_drafter().state_dict()) | {"embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(tensors[name], target[name]) for name in ("embed_tokens.weight", "lm_head.weight"))


def test_a_pruned_vocabulary_has_the_kept_rows_of_the_head_and_both_mappings(tmp_path: Path, write_cache):
    cache, _, _ = write_cache()
    target = load_file(cache / "target" / "head.safetensors")
    export(pruned_run(tmp_path / "run"), tmp_path / "s", format="speculators", cache=cache)
    tensors = load_file(tmp_path / "s" / "model.safetensors")
    assert json.loads((tmp_path / "s" / "config.json").read_text())["draft_vocab_size"] == 5
    assert torch.equal(tensors["lm_head.weight"], target["lm_head.weight"][KEPT])
    assert torch.equal(tensors["embed_tokens.weight"], target["embed_tokens.weight"])
    assert tensors["d2t"].tolist() == [0, 2, 3, 5, 5]
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == KEPT.tolist()
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)


ALL_SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9}


@pytest.mark.parametrize(
    "changes",
    [
        *SPECS,
        {"draft_vocab_size": 5},
        {"sample_from_anchor": True},
        {"rope_theta": 1e6},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 2},
    ],
)
def test_the_speculators_config_and_the_spec_say_the_same(changes: dict):
    spec = tiny_drafter(**changes).spec
    document = json.loads(json.dumps(speculators_config(spec, "bfloat16", Verifier(None, ()))))
    assert drafter_from_speculators(document, None, "x") == spec


def test_a_speculators_folder_comes_back_with_its_vocabulary_and_can_be_exported_again(tmp_path: Path, write_cache):
    cache, _, _ = write_cache()
    export(pruned_run(tmp_path / "run"), tmp_path / "s", "float32", format="speculators", cache=cache)
    first = load_drafter(tmp_path / "s")
    export(tmp_path / "s", tmp_path / "again", "float32", format="speculators", cache=cache)
    second = load_drafter(tmp_path / "again")
    assert first.spec == second.spec == load_drafter(tmp_path / "run").spec
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())


def test_the_causal_flag_is_right_for_one_kind_of_layer_and_a_mix_is_refused(tmp_path: Path, write_cache):
    cache, _, _ = write_cache()
    export(saved(tmp_path / "slides", **ALL_SLIDING), tmp_path / "s", format="speculators", cache=cache)
    assert json.loads((tmp_path / "s" / "config.json").read_text())["sliding_window_non_causal"] is False
    mixed = saved(tmp_path / "mixed", layer_types=("sliding_attention", "full_attention"), sliding_window=5)
    with pytest.raises(InputError, match="one causal flag"):
        export(mixed, tmp_path / "m", format="speculators", cache=cache)


def test_a_depth_that_nobody_knows_is_asked_for(tmp_path: Path, write_cache):
    cache, _, _ = write_cache()
    export(saved(tmp_path / "run"), tmp_path / "s", "float32", format="speculators", cache=cache)
    change_config(tmp_path / "s", num_target_layers=None)
    with pytest.raises(InputError, match="how many blocks its target has"):
        load_drafter(tmp_path / "s")
    assert load_drafter(tmp_path / "s", 6).spec == tiny_drafter().spec


def test_the_format_that_needs_the_target_asks_for_a_cache(tmp_path: Path):
    with pytest.raises(InputError, match=r"--cache") as caught:
        export(saved(tmp_path / "run"), tmp_path / "s", format="speculators")
    assert "nothing says where the run's cache is" in str(caught.value)
    with pytest.raises(InputError, match="embedding and head are not at hand"):
        export(tmp_path / "run", tmp_path / "z", include_embeddings=True)


@pytest.mark.parametrize(("settings", "said"), [({"num_layers": 7}, "another target"), ({"layer_ids": (1, 2)}, "lacks layers")])
def test_a_cache_of_another_target_or_without_the_layers_is_refused(tmp_path: Path, write_cache, settings: dict, said: str):
    cache, _, _ = write_cache(**settings)
    with pytest.raises(InputError, match=said):
        export(saved(tmp_path / "run"), tmp_path / "z", cache=cache)


def test_included_embeddings_are_the_targets_and_the_folder_is_read_all_the_same(tmp_path: Path, write_cache):
    cache, _, _ = write_cache()
    result = export(saved(tmp_path / "run"), tmp_path / "z", cache=cache, include_embeddings=True)
    tensors, target = load_file(tmp_path / "z" / "model.safetensors"), load_file(cache / "target" / "head.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target["embed_tokens.weight"])
    assert torch.equal(tensors["lm_head.weight"], target["lm_head.weight"])
    assert load_drafter(tmp_path / "z").spec == tiny_drafter().spec
    assert any("SGLang and the reference skip them" in line for line in result.warnings)


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(tmp_path: Path, write_cache):
    cache, _, _ = write_cache()
    planned = export(pruned_run(tmp_path / "run"), None, format="speculators", cache=cache, dry_run=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "run"]
    done = export(tmp_path / "run", tmp_path / "s", format="speculators", cache=cache)
    assert planned.tensors == done.tensors
    assert planned.config == done.config == json.loads((tmp_path / "s" / "config.json").read_text())
    assert {t.name: (t.dtype, t.shape, t.bytes) for t in planned.tensors}["t2d"] == ("bool", (32,), 32)
    assert {t.name: t.bytes for t in planned.tensors}["fc.weight"] == 8 * 24 * 2
    assert (planned.to_dict()["written"], planned.to_dict()["proof"], done.to_dict()["written"]) == (False, None, True)
    assert "would write" in planned.to_text()
    with pytest.raises(InputError, match="needs a folder"):
        export(tmp_path / "run", None)


def test_the_step_asked_for_is_exported_and_the_best_where_there_is_one(tmp_path: Path):
    for step in (1, 2, 3):
        state = CheckpointState(step=step, epoch=0, row=0, config=TrainConfig(), drafter=tiny_drafter().spec, best_step=2, best_tau=1.5)
        checkpoint.save(tmp_path / "run", state, tiny_drafter(seed=step).state_dict(), {}, 3)
    with pytest.raises(InputError, match="nothing was held out"):
        export(tmp_path / "run", tmp_path / "x", best=True)
    checkpoint.mark_best(tmp_path / "run", state)
    wanted = {"newest": ({}, 3), "step": ({"step": 1}, 1), "best": ({"best": True}, 2)}
    for name, (choice, seed) in wanted.items():
        result = export(tmp_path / "run", tmp_path / name, "float32", **choice)
        assert result.source.name == f"step-{seed:08d}"
        assert torch.equal(load_drafter(tmp_path / name).fc.weight, tiny_drafter(seed=seed).fc.weight)
    with pytest.raises(InputError, match="this step is not kept") as caught:
        export(tmp_path / "run", tmp_path / "x", step=4)
    assert "steps 1, 2, 3" in str(caught.value)
    with pytest.raises(InputError, match="no choice of checkpoints"):
        export(tmp_path / "newest", tmp_path / "x", step=3)


def test_the_folder_is_run_on_the_cache_or_says_that_it_was_on_random_states(tmp_path: Path, write_cache):
    cache, _, _ = write_cache()
    cached = export(saved(tmp_path / "run"), tmp_path / "a", "float32", cache=cache)
    assert (cached.proof.on, cached.proof.cache, cached.proof.anchors) == ("sample 0 of the cache", str(cache), 4)
    assert (cached.proof.tokens, cached.proof.agreeing_tokens) == (12, 12)
    assert cached.proof.largest_relative_difference < 1e-5
    assert cached.proof.rounding_difference == cached.proof.largest_relative_difference
    rounded = export(tmp_path / "run", tmp_path / "b")
    assert (rounded.proof.on, rounded.proof.cache, rounded.proof.tokens, rounded.proof.agreeing_tokens) == ("random states", None, None, None)
    assert rounded.proof.largest_relative_difference < 1e-5 < 1e-3 < rounded.proof.rounding_difference
    assert "random states" in rounded.warnings[0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"is_neox_style": False}, "interleaved_rope True"),
        ({"is_causal": True}, r"causal \(True, True\)"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, r"layer_ids \(0, 1, 3\)"),
    ],
)
def test_a_config_that_a_server_reads_otherwise_than_we_do_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict, said: str):
    monkeypatch.setattr(export_module, "serving_config", lambda spec, dtype: serving_config(spec, dtype) | fault)
    with pytest.raises(DflashError, match=said):
        export(saved(tmp_path / "run"), tmp_path / "drafter")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_folder_that_computes_something_else_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The trainer's own forward is changed: the plain one does not share its code and does not follow."""
    monkeypatch.setattr(drafter_module.F, "silu", torch.relu)
    with pytest.raises(DflashError, match="does not compute what the checkpoint computes"):
        export(saved(tmp_path / "run"), tmp_path / "drafter")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_weights_that_change_on_the_way_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def damage(tensors: dict, path: Path, metadata: dict) -> None:
        save_file({name: tensor + (name == "norm.weight") for name, tensor in tensors.items()}, path, metadata=metadata)

    monkeypatch.setattr(export_module, "save_file", damage)
    with pytest.raises(DflashError, match="does not read back equal"):
        export(saved(tmp_path / "run"), tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_the_readme_says_where_a_drafter_comes_from_and_what_was_measured(tmp_path: Path, write_cache):
    cache, spec, _ = write_cache(lengths=[20] * 6)
    tiny = {"eval": {"every": 2}, "model": {"block_size": 4, "num_layers": 1, "mask_token_id": 0}, "data": {"row_tokens": 64, "eval_fraction": 0.5}}
    run(config(**tiny), [cache], tmp_path / "run")
    result = export(tmp_path / "run", tmp_path / "d", model="org/target")
    text = (tmp_path / "d" / "README.md").read_text()
    assert result.proof.cache == str(cache)  # found where run.json says
    for said in (
        spec.fingerprint,
        "data.jsonl",
        "4 of 4",
        "label teacher",
        "xxh3-128",
        "torch ",
        "after step 4, loss",
        "tau_walk",
        "org/target",
        "`tau` counts",
    ):
        assert said in text, said
    assert str(tmp_path) not in text
    shutil.move(cache, tmp_path / "moved")
    assert "is not at" in export(tmp_path / "run", tmp_path / "e").warnings[0]
    assert export(tmp_path / "run", tmp_path / "f", cache=tmp_path / "moved").proof.on == "sample 0 of the cache"
    with pytest.raises(InputError, match="not a cache that the run was trained on"):
        export(tmp_path / "run", tmp_path / "g", cache=write_cache(name="other", chunk_tokens=8, layer_ids=(1, 2, 4, 5))[0])


@pytest.mark.parametrize(("format", "said"), [("zlab", "--speculative-num-draft-tokens 4"), ("speculators", "vllm serve DRAFTER\n")])
def test_the_readme_serves_each_format_in_its_own_way(tmp_path: Path, write_cache, format: str, said: str):
    export(saved(tmp_path / "run"), tmp_path / "d", format=format, cache=write_cache()[0], model="org/target")
    text = (tmp_path / "d" / "README.md").read_text()
    assert said in text
    assert """vllm serve org/target --speculative-config '{"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": 3}'""" in text
    assert ("sglang.launch_server" in text) is (format == "zlab")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "needs a run's folder"),
        (("run",), "needs --to DIR"),
        (("run", "--to", "d", "--best", "--step", "3"), "choose one checkpoint"),
        (("--check", "d", "--to", "x"), "--to"),
        (("run", "--check", "d"), "RUN"),
        (("--check", "d", "--dtype", "float32", "--step", "0"), "--dtype, --step"),
        (("--check", "d", "--model", "m", "--cache", "c"), "one target, not two"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words: tuple[str, ...], said: str):
    result = CliRunner().invoke(main, ["export", *words])
    assert result.exit_code == 2
    assert said in result.stderr


def test_the_command_writes_either_format(tmp_path: Path, write_cache):
    cache, _, _ = write_cache()
    saved(tmp_path / "run")
    words = [
        str(tmp_path / "run"),
        "--to",
        str(tmp_path / "s"),
        "--format",
        "speculators",
        "--cache",
        str(cache),
        "--dtype",
        "float32",
        "--step",
        "3",
    ]
    document = json.loads(CliRunner().invoke(main, ["export", *words, "--json"], catch_exceptions=False).stdout)
    assert (document["format"], document["written"], document["num_speculative_tokens"], document["proof"]["agreeing_tokens"]) == (
        "speculators",
        True,
        3,
        12,
    )
    planned = CliRunner().invoke(main, ["export", str(tmp_path / "run"), "--dry-run"], catch_exceptions=False)
    assert "layers.1.mlp.down_proj.weight" in planned.stdout


def test_an_exported_speculators_folder_is_evaluated_and_trained_on(tmp_path: Path, write_cache):
    cache, _, _ = write_cache(lengths=[20, 30], next_token=7)
    export(saved(tmp_path / "run"), tmp_path / "s", "float32", format="speculators", cache=cache)
    compute = EvalConfig(device="cpu", dtype="float32")
    ours, theirs = (evaluate(tmp_path / name, [cache], compute) for name in ("run", "s"))
    assert (ours.walk, ours.quality) == (theirs.walk, theirs.quality)
    sizes = {"block_size": 4, "num_layers": 2, "mask_token_id": 3, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
    summary = run(config(model=sizes, init={"from": str(tmp_path / "s")}, optim={"steps": 1}), [cache], tmp_path / "next")
    assert summary.steps == 1
