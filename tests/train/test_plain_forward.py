"""The plain forward against the trainer's drafter, and its own reading of a folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rows import CPU32, Document, H, TinyHead, V, make_batch, tiny_drafter
from safetensors.torch import load_file, save_file

from dflash_cache.common.errors import InputError
from dflash_cache.train import checkpoint
from dflash_cache.train.anchors import pad_anchors
from dflash_cache.train.checkpoint import CheckpointState
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.conventions import served_conventions, trained_conventions
from dflash_cache.train.drafter import Drafter
from dflash_cache.train.export import export
from dflash_cache.train.plain_forward import PlainDrafter, visible
from dflash_cache.train.step import draft, row_inputs

MIXED = ("sliding_attention", "full_attention")
VARIANTS = {
    "full": {},
    "sliding": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 4},
    "mixed, shared heads": {"layer_types": MIXED, "sliding_window": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    "sliding shorter than a block": {"layer_types": MIXED, "sliding_window": 2},
    "another rotary base": {"rope_theta": 1e6, "block_size": 6},
}


def exported(drafter: Drafter, folder: Path, dtype: str = "float32") -> Path:
    state = CheckpointState(step=1, epoch=0, row=0, config=TrainConfig(), drafter=drafter.spec)
    checkpoint.save(folder / "run", state, drafter.state_dict(), {}, 1)
    export(folder / "run", folder / "drafter", dtype=dtype)
    return folder / "drafter"


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_plain_forward_of_an_export_is_the_trainers(tmp_path: Path, changes: dict):
    drafter, head = tiny_drafter(**changes), TinyHead()
    plain = PlainDrafter.load(exported(drafter, tmp_path))
    assert plain.conventions == trained_conventions(drafter.spec)
    batch, size = make_batch([Document(5, seed=1), Document(14, seed=2), Document(9, seed=3)], 32), drafter.spec.block_size
    rows, starts = (1, 6, 12, 18, 22), (0, 5, 5, 5, 19)
    with torch.no_grad():
        ours_ABH = draft(drafter, drafter.spec, head, row_inputs(batch, CPU32), pad_anchors(torch.tensor(rows), 8), CPU32).unflatten(0, (8, size))
    for ours_BH, row, start in zip(ours_ABH, rows, starts):
        hidden_BH = plain.block(batch.features[start:].float(), int(batch.input_ids_T[row]), row - start, head.embed)
        torch.testing.assert_close(hidden_BH, ours_BH, atol=1e-5, rtol=1e-5)
        assert plain.tokens(hidden_BH, head.head.weight_VH) == (ours_BH[1:] @ head.head.weight_VH.T).argmax(-1).tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 100.0},
        {"mask_token_id": 5},
        {"causal": (True, True)},
        {"windows": (3, 3)},
        {"own_row": True},
        {"position_offset": 1},
        {"embedding_scale": 2.0},
        {"interleaved_rope": True},
        {"norm_eps": 0.1},
        {"block_size": 5},
    ],
    ids=str,
)
def test_every_convention_changes_the_block(tmp_path: Path, change: dict):
    plain, batch, head = PlainDrafter.load(exported(tiny_drafter(), tmp_path)), make_batch([Document(12)]), TinyHead()
    one, other = (plain.block(batch.features, 7, 9, head.embed, how) for how in (plain.conventions, replace(plain.conventions, **change)))
    assert float((one[:4] - other[:4]).abs().max()) > 0.01


def test_rows_from_the_anchor_on_are_not_looked_at(tmp_path: Path):
    plain, batch, head = PlainDrafter.load(exported(tiny_drafter(), tmp_path)), make_batch([Document(12)]), TinyHead()
    assert torch.equal(plain.block(batch.features, 7, 5, head.embed), plain.block(batch.features[:5], 7, 5, head.embed))


def test_a_window_counts_the_slot_itself():
    """Anchor at 4, window 3: slot 0 sees rows 2 and 3 and itself; slot 1 sees row 3, slot 0 and itself."""
    how = replace(trained_conventions(tiny_drafter(layer_types=("sliding_attention",) * 2, sliding_window=3).spec), block_size=3)
    assert visible(4, 4, how, 0).int().tolist() == [[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]]


def test_a_pruned_vocabulary_proposes_only_kept_tokens(tmp_path: Path):
    plain, head = PlainDrafter.load(exported(tiny_drafter(), tmp_path)), TinyHead()
    pruned = replace(plain, tensors={**plain.tensors, "d2t": torch.tensor([2, 4, 9])})  # tokens 2, 5, 11
    hidden_BH = torch.randn(4, H, generator=torch.Generator().manual_seed(0))
    logits = pruned.logits(hidden_BH, head.head.weight_VH)
    assert logits.shape == (4, V)
    assert logits.isfinite().any(0).nonzero().squeeze(1).tolist() == [2, 5, 11]
    torch.testing.assert_close(logits[:, 5], plain.logits(hidden_BH, head.head.weight_VH)[:, 5])


CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-6, "block_size": 4}


def reading(**changes: object):
    nested = {"target_layer_ids": [1, 2, 4], "mask_token_id": 3}
    return served_conventions({**CONFIG, "rope_theta": 1e4, "dflash_config": nested, **changes}, "here")


def test_what_vllm_reads_first_is_read_first():
    assert reading(mask_token_id=9).mask_token_id == 3
    assert reading(eagle_aux_hidden_state_layer_ids=[1, 2, 4]).layer_ids == (0, 1, 3)
    assert reading(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope_theta == 5e5
    assert reading(layer_types=["sliding_attention"] * 2, sliding_window=7, use_sliding_window=True).causal == (True, True)
    assert reading(layer_types=["sliding_attention"] * 2, sliding_window=7, use_sliding_window=True, is_causal=False).causal == (False, False)
    assert reading(dflash_config={"target_layer_ids": [4, 1, 2], "mask_token_id": 3}).layer_ids == (1, 2, 4)
    assert reading(rope_theta=None).rope_theta == 10000.0


JUNK = [True, -1, 1.5, 10**30, float("nan"), "x", [1], ["x"], [[1]], {"a": 1}]


@pytest.mark.parametrize("value", JUNK, ids=map(str, JUNK))
def test_no_value_of_any_field_is_read_as_another_or_fails_without_a_word(value: object):
    layer = {**CONFIG, "rope_theta": 1e4, "hidden_size": 8, "layer_types": ["full_attention"] * 2, "rope_parameters": None}
    nested = {"target_layer_ids": [1, 2, 4], "mask_token_id": 3}
    spec = {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}, "aux_hidden_state_layer_ids": [2, 3, 5], "mask_token_id": 3}
    spec |= {"speculators_model_type": "dflash", "transformer_layer_config": layer}
    documents = [{**layer, "dflash_config": nested, name: value} for name in [*layer, "dflash_config"]]
    documents += [{**layer, "dflash_config": {**nested, name: value}} for name in nested]
    documents += [{**spec, name: value} for name in [*spec][:3]]
    documents += [{**spec, "transformer_layer_config": value}]
    refused = 0
    for document in documents:
        try:
            served_conventions(document, "here")
        except InputError:
            refused += 1
    assert refused >= len(documents) - 3  # a number for a float, and the sizes that vLLM derives another from


def test_a_window_that_vllm_would_not_see_is_refused():
    with pytest.raises(InputError, match="no window"):
        reading(layer_types=["sliding_attention"] * 2, sliding_window=7)


def test_a_speculators_folder_is_read_as_vllm_rewrites_it(tmp_path: Path):
    """Ids there count block inputs; without `sliding_window_non_causal: true` vLLM serves every layer causally when the field is false."""
    layer = {**{name: value for name, value in CONFIG.items() if name != "block_size"}, "rope_theta": 1e4}
    config = {"speculators_model_type": "dflash", "transformer_layer_config": layer, "aux_hidden_state_layer_ids": [2, 3, 5], "mask_token_id": 3}
    methods = {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}

    def read(**changes: object):
        return served_conventions({**config, **methods, "transformer_layer_config": {**layer, **changes}}, "here")

    assert read(rope_theta=None).rope_theta == 1e6  # set_default_rope_theta of qwen3_dflash.py
    assert read(head_dim=None, hidden_size=12).head_dim == 6
    sliding = ["sliding_attention"] * 2
    assert read(layer_types=sliding, sliding_window=7, use_sliding_window=False).windows == (7, 7)
    with pytest.raises(InputError, match="num_key_value_heads"):
        served_conventions({**config, **methods, "transformer_layer_config": {"num_hidden_layers": 2, "num_attention_heads": 2}}, "here")
    found = served_conventions({**config, **methods, "sliding_window_non_causal": True}, "here")
    assert (found.layer_ids, found.block_size, found.causal) == ((1, 2, 4), 4, (False, False))
    assert served_conventions({**config, **methods, "sliding_window_non_causal": False}, "here").causal == (True, True)


def test_a_quantised_folder_is_refused(tmp_path: Path):
    folder = exported(tiny_drafter(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"quantised tensors.*\n?.*fc\.weight"):
        PlainDrafter.load(folder)
    (folder / "config.json").write_text(json.dumps([]))
    with pytest.raises(InputError):
        PlainDrafter.load(folder)
