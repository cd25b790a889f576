"""The `dflash` package, the reference implementation, loads our export and computes what our drafter computes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from rows import CPU32, Document, H, TinyHead, make_batch, tiny_drafter

from dflash_cache.train import checkpoint
from dflash_cache.train.anchors import pad_anchors
from dflash_cache.train.checkpoint import CheckpointState
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.export import export
from dflash_cache.train.plain_forward import PlainDrafter
from dflash_cache.train.step import draft, row_inputs

MIXED = ("sliding_attention", "full_attention")
VARIANTS = {
    "full": {},
    "sliding": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 4},
    "mixed": {"layer_types": MIXED, "sliding_window": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    "sliding shorter than a block": {"layer_types": MIXED, "sliding_window": 2},
    "another rotary base": {"rope_theta": 1e6, "block_size": 6},
}


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch):
    """The reference's drafter class, from a folder that holds the package alone."""
    folder = Path(os.environ.get("DFLASH_REFERENCE") or Path(__file__).parents[2] / ".venv" / "reference")
    if not (folder / "dflash" / "model.py").is_file():
        pytest.fail(f"the reference implementation is not in {folder}: pip install --no-deps --target {folder} dflash==0.1.0")
    monkeypatch.syspath_prepend(str(folder))
    from dflash.model import DFlashDraftModel

    yield DFlashDraftModel
    for name in [name for name in sys.modules if name == "dflash" or name.startswith("dflash.")]:
        del sys.modules[name]


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_reference_loads_the_export_and_its_forward_is_ours(reference, tmp_path: Path, changes: dict):
    drafter = tiny_drafter(**changes)
    state = CheckpointState(step=1, epoch=0, row=0, config=TrainConfig(), drafter=drafter.spec)
    checkpoint.save(tmp_path / "run", state, drafter.state_dict(), {}, 1)
    export(tmp_path / "run", tmp_path / "drafter", dtype="float32")
    theirs, info = reference.from_pretrained(tmp_path / "drafter", dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (theirs.block_size, theirs.mask_token_id, list(theirs.target_layer_ids)) == (drafter.spec.block_size, 3, [1, 2, 4])

    plain = PlainDrafter.load(tmp_path / "drafter")
    batch, head, size = make_batch([Document(5, seed=1), Document(14, seed=2), Document(9, seed=3)], 32), TinyHead(), drafter.spec.block_size
    anchors = pad_anchors(torch.tensor([1, 6, 12, 18, 22]), 8)  # in three documents, some close to their end or start
    inputs = row_inputs(batch, CPU32)
    with torch.no_grad():
        ours = draft(drafter, drafter.spec, head, inputs, anchors, CPU32).unflatten(0, (8, size))
        for block, (row, start) in enumerate(zip((1, 6, 12, 18, 22), (0, 5, 5, 5, 19))):
            ids = torch.full((1, size), 3)
            ids[0, 0] = batch.input_ids_T[row]
            out = theirs(
                position_ids=torch.arange(row - start + size)[None],
                noise_embedding=head.embed(ids),
                target_hidden=inputs.features_TF[None, start:row],
            )
            assert out.shape == (1, size, H)
            torch.testing.assert_close(ours[block], out[0], atol=1e-5, rtol=1e-5)
            witness = plain.block(batch.features[start:], int(batch.input_ids_T[row]), row - start, head.embed)
            torch.testing.assert_close(witness, out[0], atol=1e-5, rtol=1e-5)


def test_the_reference_passes_over_included_embeddings(reference, tmp_path: Path, write_cache):
    drafter = tiny_drafter()
    checkpoint.save(
        tmp_path / "run", CheckpointState(step=1, epoch=0, row=0, config=TrainConfig(), drafter=drafter.spec), drafter.state_dict(), {}, 1
    )
    export(tmp_path / "run", tmp_path / "drafter", "float32", include_embeddings=True, cache=write_cache()[0])
    theirs, info = reference.from_pretrained(tmp_path / "drafter", dtype="auto", output_loading_info=True)
    assert {name for names in info.values() for name in names} == {"embed_tokens.weight", "lm_head.weight"} == set(info["unexpected_keys"])
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in drafter.state_dict().items())


def test_a_window_matters_and_full_attention_would_differ(reference, tmp_path: Path):
    """Window 4 on 12 tokens: the same weights with full attention give something else, so the parity above means something."""
    batch, anchors, head = make_batch([Document(12)]), pad_anchors(torch.tensor([9]), 1), TinyHead()
    outs = []
    for changes in ({}, VARIANTS["sliding"]):
        drafter = tiny_drafter(**changes)
        with torch.no_grad():
            outs.append(draft(drafter, drafter.spec, head, row_inputs(batch, CPU32), anchors, CPU32))
    assert float((outs[0] - outs[1]).abs().max()) > 0.01
