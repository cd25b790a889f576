"""First weights: from another drafter, from the target's layers, and every way in which they can fail to fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rows import tiny_drafter, tiny_spec
from safetensors.torch import load_file, save_file
from tiny_run import config
from torch import nn

from dflash_cache.common.errors import InputError
from dflash_cache.train import checkpoint
from dflash_cache.train.checkpoint import CheckpointState
from dflash_cache.train.config import InitConfig, TrainConfig
from dflash_cache.train.draft_head import is_kept, offsets
from dflash_cache.train.drafter import Drafter
from dflash_cache.train.drafter_folder import load_drafter
from dflash_cache.train.drafter_init import first_drafter, initialize_from
from dflash_cache.train.export import export
from dflash_cache.train.run import run
from dflash_cache.train.target_layers import norm_offset, spread_blocks

H, BLOCKS = 8, 6


class Zero(nn.Module):
    """A zero-centred RMSNorm, as Gemma's and Qwen3.5's."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * (1 + self.weight)


class Plain(Zero):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight


class Target:
    """Stands for a TargetHead, of which only the norm is looked at."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm


def final_norm() -> torch.Tensor:
    return torch.linspace(0.5, 1.5, H)


def target_folder(
    folder: Path, prefix: str = "model.", *, sharded: bool = False, drop: tuple[str, ...] = (), **extra: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Six decoder layers of the drafter's sizes, without q/k norms, as a Llama-like target has them; a vision tower beside them."""
    generator = torch.Generator().manual_seed(7)
    shapes = {name: tuple(tensor.shape) for name, tensor in Drafter(tiny_spec()).layers[0].state_dict().items() if "_norm" not in name}
    tensors = {f"{prefix}layers.{block}.{name}": torch.randn(shape, generator=generator) for block in range(BLOCKS) for name, shape in shapes.items()}
    tensors |= {f"{prefix}norm.weight": final_norm(), f"{prefix}embed_tokens.weight": torch.zeros(32, H), "lm_head.weight": torch.zeros(32, H)}
    tensors |= {"model.visual.blocks.0.attn.weight": torch.zeros(2), **extra}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop}
    folder.mkdir(parents=True)
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name, where in files.items() if where == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return tensors


def saved(run: Path, drafter: Drafter) -> Path:
    checkpoint.save(run, CheckpointState(step=3, epoch=0, row=3, config=TrainConfig(), drafter=drafter.spec), drafter.state_dict(), {}, 2)
    return run


def started(source: str, norm: nn.Module | None = None, blocks: tuple[int, ...] | None = None, **changes) -> Drafter:
    drafter = Drafter(tiny_spec(**changes)).initialize(torch.Generator().manual_seed(1))
    initialize_from(drafter, InitConfig(source=source, target_blocks=blocks), Target(norm or Plain(final_norm())))
    return drafter


def equal(one: Drafter, other: Drafter) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


@pytest.mark.parametrize("form", ["run", "checkpoint", "zlab"])
def test_a_drafter_starts_from_another_whatever_the_form_of_its_folder(tmp_path: Path, form: str):
    other = tiny_drafter(seed=5)
    run = saved(tmp_path / "run", other)
    if form == "zlab":
        export(run, tmp_path / "zlab", dtype="float32")
    folder = {"run": run, "checkpoint": checkpoint.newest(run), "zlab": tmp_path / "zlab"}[form]
    assert equal(started(str(folder)), other)


def speculators_folder(folder: Path, drafter: Drafter, **changes) -> Path:
    """As the library writes it: defaults left out, the target's matrices beside the drafter's."""
    spec = drafter.spec
    folder.mkdir()
    layer = {"hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16}
    layer |= {"vocab_size": 32, "max_position_embeddings": 4096, "model_type": "qwen3"}
    document = {"speculators_model_type": "dflash", "transformer_layer_config": layer, "aux_hidden_state_layer_ids": [2, 3, 5], "block_size": 4}
    document |= {"mask_token_id": 3, "draft_vocab_size": spec.draft_vocab_size or 32, "sliding_window_non_causal": False, "sample_from_anchor": False}
    (folder / "config.json").write_text(json.dumps(document | changes))
    tensors = dict(drafter.state_dict()) | {"embed_tokens.weight": torch.zeros(32, H), "lm_head.weight": torch.zeros(spec.draft_vocab_size or 32, H)}
    if drafter.d2t is not None:
        tensors["t2d"] = is_kept(drafter.d2t, 32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_drafter_starts_from_a_speculators_folder(tmp_path: Path):
    other = tiny_drafter(seed=5)
    assert equal(started(str(speculators_folder(tmp_path / "s", other))), other)


def test_a_pruned_speculators_folder_is_read_with_its_own_vocabulary(tmp_path: Path):
    other = tiny_drafter(seed=5, draft_vocab_size=3)
    other.d2t.copy_(offsets(torch.tensor([3, 7, 9])))
    found = load_drafter(speculators_folder(tmp_path / "s", other), BLOCKS)
    assert found.d2t.tolist() == [3, 6, 7]
    assert found.spec == other.spec


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculators_model_type": "eagle3"}, "no DFlash drafter"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "Qwen3 layers"),
        ({"block_size": None}, "cannot be used"),
        ({"aux_hidden_state_layer_ids": [0, 3, 5]}, "no ascending choice of 6 blocks"),
    ],
)
def test_a_speculators_folder_of_another_kind_is_refused(tmp_path: Path, changes: dict, said: str):
    with pytest.raises(InputError, match=said):
        started(str(speculators_folder(tmp_path / "s", tiny_drafter(), **changes)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_layer_ids": (0, 2, 4)}, r"target_layer_ids: it has \[0, 2, 4\], this run \[1, 2, 4\]"),
        ({"intermediate_size": 12}, "intermediate_size: it has 12, this run 16"),
        ({"head_dim": 6}, "head_dim: it has 6, this run 4"),
        ({"num_layers": 1, "layer_types": ("full_attention",)}, "num_layers: it has 1, this run 2"),
        ({"rope_theta": 1e6}, r"rope_theta: it has 1000000.0, this run 10000.0"),
        ({"mask_token_id": 2}, "mask_token_id: it has 2, this run 3"),
        ({"vocab_size": 40}, "vocab_size: it has 40, this run 32"),
    ],
)
def test_a_drafter_whose_weights_mean_something_else_is_refused_naming_both(tmp_path: Path, changes: dict, said: str):
    with pytest.raises(InputError, match=said):
        started(str(saved(tmp_path / "run", tiny_drafter(**changes))))


def test_block_size_and_window_may_change_between_two_trainings(tmp_path: Path):
    other = tiny_drafter(seed=5, block_size=8, layer_types=("sliding_attention", "full_attention"), sliding_window=5)
    assert equal(started(str(saved(tmp_path / "run", other))), other)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
def test_a_drafter_starts_from_the_targets_layers(tmp_path: Path, prefix: str, sharded: bool):
    tensors = target_folder(tmp_path / "target", prefix, sharded=sharded)
    drafter = started(f"target:{tmp_path / 'target'}", blocks=(1, 4))
    for number, block in enumerate((1, 4)):
        for name, parameter in drafter.layers[number].named_parameters():
            expected = tensors.get(f"{prefix}layers.{block}.{name}", torch.ones(4))  # a target without q/k norms: they are 1
            assert torch.equal(parameter, expected), name
    assert torch.equal(drafter.norm.weight, final_norm())
    random = Drafter(tiny_spec()).initialize(torch.Generator().manual_seed(1))
    assert torch.equal(drafter.fc.weight, random.fc.weight)


def test_norms_of_a_target_that_adds_one_to_them_come_over_with_the_one_added(tmp_path: Path):
    tensors = target_folder(tmp_path / "target")
    drafter = started(f"target:{tmp_path / 'target'}", Zero(final_norm()))
    assert torch.equal(drafter.norm.weight, final_norm() + 1)
    assert torch.equal(drafter.layers[0].input_layernorm.weight, tensors["model.layers.0.input_layernorm.weight"] + 1)
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, tensors["model.layers.0.mlp.up_proj.weight"])


def test_a_norm_with_a_bias_is_refused():
    with pytest.raises(InputError, match="no RMSNorm"):
        norm_offset(nn.LayerNorm(H), "x")


def test_blocks_are_spread_from_the_first_to_the_last():
    assert (spread_blocks(1, 6), spread_blocks(2, 6), spread_blocks(5, 64)) == ((5,), (0, 5), (0, 16, 32, 47, 63))


@pytest.mark.parametrize(
    ("folder", "changes", "said"),
    [
        ({}, {"intermediate_size": 12}, r"mlp\.down_proj\.weight \[8, 16\], the drafter's is \[8, 12\]"),
        ({"model.layers.5.self_attn.q_proj.bias": torch.zeros(8)}, {}, r"self_attn\.q_proj\.bias, which the drafter lacks"),
        ({"drop": ("model.layers.5.self_attn.v_proj.weight",)}, {}, r"no self_attn\.v_proj\.weight"),
        ({}, {"num_target_layers": 7}, "has not the target's layers"),
    ],
)
def test_a_block_that_cannot_become_a_drafter_layer_is_refused(tmp_path: Path, folder: dict, changes: dict, said: str):
    target_folder(tmp_path / "target", **folder)
    with pytest.raises(InputError, match=said):
        started(f"target:{tmp_path / 'target'}", **changes)


def test_an_index_that_leads_out_of_the_targets_folder_is_not_followed(tmp_path: Path):
    tensors = target_folder(tmp_path / "elsewhere")
    (tmp_path / "target").mkdir()
    index = {"weight_map": dict.fromkeys(tensors, "../elsewhere/model.safetensors")}
    (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"(?s)init.from .*outside of the folder"):
        started(f"target:{tmp_path / 'target'}")


def test_another_target_than_the_caches_is_refused(tmp_path: Path):
    target_folder(tmp_path / "target")
    with pytest.raises(InputError, match="another target"):
        started(f"target:{tmp_path / 'target'}", Plain(final_norm() + 0.25))


def test_blocks_that_do_not_exist_are_refused(tmp_path: Path):
    target_folder(tmp_path / "target")
    for blocks in ((0, 6), (1,)):
        with pytest.raises(InputError, match="does not fit the drafter and its target"):
            started(f"target:{tmp_path / 'target'}", blocks=blocks)


@pytest.mark.parametrize("source", ["nowhere", "target:nowhere"])
def test_a_folder_without_weights_is_a_user_error(source: str):
    with pytest.raises(InputError):
        started(source)


def test_a_run_that_goes_on_does_not_look_at_its_source_again():
    drafter, lines = first_drafter(
        tiny_spec(), InitConfig(source="gone"), (), Target(Plain(final_norm())), torch.Generator().manual_seed(0), fresh=False
    )
    assert (len(list(drafter.parameters())), lines) == (25, [])


def test_without_a_source_weights_are_those_of_the_seed():
    drafter, lines = first_drafter(tiny_spec(), InitConfig(), (), Target(Plain(final_norm())), torch.Generator().manual_seed(0))
    assert equal(drafter, Drafter(tiny_spec()).initialize(torch.Generator().manual_seed(0)))
    assert lines == ["starts    from random weights"]


def test_what_is_read_stays_unchanged_on_disk(tmp_path: Path):
    tensors = target_folder(tmp_path / "target")
    started(f"target:{tmp_path / 'target'}", Zero(final_norm()))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(tmp_path / "target" / "model.safetensors").items())


def test_a_run_starts_from_another_runs_weights_and_goes_on_without_them(write_cache, tmp_path: Path, capsys: pytest.CaptureFixture):
    """With a learning rate of almost nothing the weights stay those it started from; resumed, the source may be gone."""
    cache, _, _ = write_cache(lengths=[20, 30])
    run(config(optim={"steps": 2}), [cache], tmp_path / "first")
    source = load_drafter(tmp_path / "first")
    small = config(init={"from": str(tmp_path / "first")}, optim={"steps": 2, "lr": 1e-12})
    with_less = small.model_copy(update={"run": small.run.model_copy(update={"seed": 3})})
    run(with_less, [cache], tmp_path / "second")
    assert f"starts    from all weights of {tmp_path / 'first'}" in capsys.readouterr().err
    for one, other in zip(load_drafter(tmp_path / "second").parameters(), source.parameters()):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-6)
    shutil.rmtree(tmp_path / "first")
    run(with_less, [cache], tmp_path / "second", resume=True)


def test_a_run_that_cannot_start_from_what_it_was_told_fails_before_it_begins(write_cache, tmp_path: Path):
    cache, _, _ = write_cache(lengths=[20, 30])
    with pytest.raises(InputError, match="holds no drafter"):
        run(config(init={"from": str(tmp_path / "nothing")}), [cache], tmp_path / "out")
    assert not (tmp_path / "out" / "run.json").exists()
