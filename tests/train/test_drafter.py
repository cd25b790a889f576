"""The drafter: names, what sees what, types, and two forms of attention."""

from __future__ import annotations

import pytest
import torch
from rows import CPU32, Document, H, TinyHead, make_batch, tiny_drafter, tiny_spec
from torch import nn

from dflash_cache.train.anchors import Anchors, pad_anchors
from dflash_cache.train.batch import Batch
from dflash_cache.train.device import Compute
from dflash_cache.train.drafter import Drafter, RMSNorm, Rotary
from dflash_cache.train.masks import block_mask, dense_mask, queries, query_positions
from dflash_cache.train.step import draft, row_inputs

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3}


def hidden(drafter: Drafter, batch: Batch, anchors: Anchors) -> torch.Tensor:
    """[A, B, H]."""
    with torch.no_grad():
        return draft(drafter, drafter.spec, TinyHead(), row_inputs(batch, CPU32), anchors, CPU32).unflatten(0, (len(anchors), -1))


def test_a_drafter_has_11_tensors_a_layer_and_3_more_under_their_serving_names():
    names = set(Drafter(tiny_spec(num_layers=5, layer_types=("full_attention",) * 5)).state_dict())
    assert len(names) == 58
    layer = {n.removeprefix("layers.4.") for n in names if n.startswith("layers.4.")}
    attention = {f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    mlp = {f"mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
    assert layer == attention | mlp | {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert names > {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_fc_reads_all_selected_layers_each_of_them_matters():
    spec = tiny_spec()
    assert Drafter(spec).fc.weight.shape == (H, 3 * H)
    drafter, batch, anchors = tiny_drafter(), make_batch([Document(10)]), pad_anchors(torch.tensor([6]), 1)
    base = hidden(drafter, batch, anchors)
    for layer in range(3):
        changed = make_batch([Document(10)])
        changed.features[2, layer] += 1
        assert not torch.equal(hidden(drafter, changed, anchors), base)


@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_a_block_never_sees_features_at_or_after_its_anchor(changes: dict):
    """Anchors 10 and 12: features of row 12 on change neither block, rows 10 and 11 only the second, row 9 both."""
    drafter, anchors = tiny_drafter(**changes), pad_anchors(torch.tensor([10, 12]), 1)
    base = hidden(drafter, make_batch([Document(20)]), anchors)
    same = {}
    for row in (9, 10, 11, 12, 13, 19):
        batch = make_batch([Document(20)])
        batch.features[row] += 1
        found = hidden(drafter, batch, anchors)
        same[row] = tuple(torch.equal(found[block], base[block]) for block in range(2))
    assert same == {9: (False, False), 10: (True, False), 11: (True, False), 12: (True, True), 13: (True, True), 19: (True, True)}


def test_a_block_never_sees_another_document():
    drafter, anchors = tiny_drafter(), pad_anchors(torch.tensor([5, 15]), 1)
    base = hidden(drafter, make_batch([Document(10, seed=1), Document(10, seed=2)]), anchors)
    found = hidden(drafter, make_batch([Document(10, seed=3), Document(10, seed=2)]), anchors)
    assert torch.equal(found[1], base[1])
    assert not torch.equal(found[0], base[0])


def test_a_block_never_sees_another_block_or_padding():
    drafter, batch = tiny_drafter(), make_batch([Document(10)])
    alone = hidden(drafter, batch, pad_anchors(torch.tensor([6]), 1))
    among = hidden(drafter, batch, pad_anchors(torch.tensor([5, 6, 7]), 8))
    torch.testing.assert_close(among[1], alone[0], atol=1e-6, rtol=1e-5)
    assert among.isfinite().all()


@pytest.mark.parametrize(("kind", "window"), [("full_attention", None), ("sliding_attention", 100)])
def test_slots_see_later_slots_in_full_layers_only(kind: str, window: int | None):
    drafter = tiny_drafter(num_layers=1, layer_types=(kind,), sliding_window=window)
    batch, anchors = make_batch([Document(10)]), pad_anchors(torch.tensor([6]), 1)
    of = queries(anchors.row_A, anchors.keep_A, batch.document_T, 4)
    masks = {kind: dense_mask(of, batch.document_T, window)}
    block = torch.randn(4, H, generator=torch.Generator().manual_seed(0))
    other = block.clone()
    other[3] += 1
    inputs = row_inputs(batch, CPU32)
    with torch.no_grad():
        positions = query_positions(anchors.row_A, batch.position_T, 4)
        first, second = (drafter(inputs.features_TF, inputs.position_T, each, positions, masks) for each in (block, other))
    assert torch.equal(first[:3], second[:3]) == (kind == "sliding_attention")


def test_a_sliding_layer_forgets_what_lies_behind_its_window():
    """Window 3, anchor 10, one layer: slot 0 sees rows 8 and 9, slot 1 row 9, later slots none."""
    drafter = tiny_drafter(num_layers=1, layer_types=("sliding_attention",), sliding_window=3)
    anchors = pad_anchors(torch.tensor([10]), 1)
    base = hidden(drafter, make_batch([Document(20)]), anchors)[0]
    for row, changed_slots in ((7, []), (8, [0]), (9, [0, 1])):
        batch = make_batch([Document(20)])
        batch.features[row] += 1
        found = hidden(drafter, batch, anchors)[0]
        assert [slot for slot in range(4) if not torch.equal(found[slot], base[slot])] == changed_slots


@pytest.mark.parametrize("changes", [{}, SLIDING])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_flex_attention_equals_the_dense_mask_also_without_any_context(length: int, changes: dict):
    drafter = tiny_drafter(head_dim=16, **changes)
    batch = make_batch([Document(length, supervised=[1] * length)])
    anchors = pad_anchors(torch.unique(torch.tensor([0, length // 2, length - 1])), 4)
    of, inputs = queries(anchors.row_A, anchors.keep_A, batch.document_T, 4), row_inputs(batch, CPU32)
    positions, embedded = query_positions(anchors.row_A, batch.position_T, 4), TinyHead().embed(torch.full((16,), 3))
    windows = {kind: drafter.spec.sliding_window if kind == "sliding_attention" else None for kind in drafter.spec.layer_types}
    out = []
    for make in (dense_mask, block_mask):
        masks = {kind: make(of, batch.document_T, window) for kind, window in windows.items()}
        with torch.no_grad():
            out.append(drafter(inputs.features_TF, inputs.position_T, embedded, positions, masks))
    assert out[0].isfinite().all()
    torch.testing.assert_close(out[0], out[1], atol=1e-4, rtol=1e-4)


def test_the_norm_is_that_of_torch_and_rotation_keeps_lengths_and_relative_angles():
    norm, reference = RMSNorm(8, 1e-6), nn.RMSNorm(8, 1e-6)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(norm(x), reference(x))
    q, k = torch.randn(2, 1, 1, 4, generator=torch.Generator().manual_seed(1))
    products = [(Rotary(torch.tensor([p + 3]), 4, 100.0)(q) * Rotary(torch.tensor([p]), 4, 100.0)(k)).sum() for p in (0, 7, 50)]
    torch.testing.assert_close(products[0], products[1])
    torch.testing.assert_close(products[0], products[2], atol=1e-5, rtol=1e-5)


def test_weights_stay_float32_and_gradients_too_when_products_are_bfloat16():
    drafter, compute = tiny_drafter(), Compute(torch.device("cpu"), torch.bfloat16, "dense")
    anchors, batch = pad_anchors(torch.tensor([5, 6]), 1), make_batch([Document(10)])
    out = draft(drafter, drafter.spec, TinyHead(dtype=torch.bfloat16), row_inputs(batch, compute), anchors, compute)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())
    torch.testing.assert_close(out.detach().float().unflatten(0, (2, 4)), hidden(drafter, batch, anchors), atol=0.1, rtol=0.1)
