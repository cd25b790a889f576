"""The speculators library, another trainer of DFlash drafters, computes our losses and gradients where the definitions coincide.

They coincide for full attention, anchors a block away from their document's end, and documents that are supervised from there
on. Its loss is a mean over slots where ours is one over weights: both are multiplied out here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import CPU32, Document, H, TinyHead, V, make_batch, tiny_drafter
from safetensors.torch import load_file

from dflash_cache.train import checkpoint, step
from dflash_cache.train.anchors import Anchors
from dflash_cache.train.checkpoint import CheckpointState
from dflash_cache.train.config import LossConfig, TrainConfig
from dflash_cache.train.draft_head import draft_head, is_kept, offsets
from dflash_cache.train.drafter import Drafter
from dflash_cache.train.drafter_folder import load_drafter
from dflash_cache.train.export import export
from dflash_cache.train.lint import lint
from dflash_cache.train.loss import Head
from dflash_cache.train.metrics import quality
from dflash_cache.train.speculators_config import DEFAULTS
from dflash_cache.train.step import StepSeeds, row_loss
from dflash_cache.train.vocabulary import kept_tokens

NAMES = {"ce": "ce", "kl": "kl_div", "reverse-kl": "rkl", "tv": "tv", "lk": "nla", "lk-hybrid": "lk_hybrid"}
"""Our terms in its words."""
PACKAGES = ("speculators", "hs_connectors")
DOCUMENTS = [Document(12, seed=1), Document(16, seed=2, supervised=[0] * 5 + [1] * 11)]
ANCHORS = [2, 5, 17, 20]


@pytest.fixture(scope="module")
def library():
    """The package, from a folder that holds it without what it depends on."""
    folder = Path(os.environ.get("DFLASH_REFERENCE") or Path(__file__).parents[2] / ".venv" / "reference")
    if not (folder / "speculators" / "losses").is_dir():
        pytest.fail(f"speculators is not in {folder}: pip install --no-deps --target {folder} -r requirements/reference.txt")
    sys.path.insert(0, str(folder))
    try:
        import speculators.losses
        import speculators.models.dflash.core as core
        import speculators.train.vocab_mapping  # noqa: F401

        yield core
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
            del sys.modules[name]


def theirs(core: Any, drafter: Drafter, head: TinyHead) -> Any:
    """Its drafter with our weights and our target; attention written out, on the CPU."""
    from speculators.models.dflash import DFlashSpeculatorConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    spec = drafter.spec
    layer = Qwen3Config(
        hidden_size=H,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        vocab_size=V,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
    )
    layer._attn_implementation = "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=spec.draft_vocab_size or V,
        block_size=spec.block_size,
        aux_hidden_state_layer_ids=[number + 1 for number in spec.target_layer_ids],
        mask_token_id=spec.mask_token_id,
        sample_from_anchor=spec.sample_from_anchor,
    )
    model = core.DFlashDraftModel(config).float()
    found = model.load_state_dict(drafter.state_dict() | ({} if drafter.d2t is None else {"t2d": is_kept(drafter.d2t, V)}), strict=False)
    assert not found.unexpected_keys
    rows = draft_head(head.head, drafter.d2t).head.weight_VH
    with torch.no_grad():
        model.embed_tokens.weight.copy_(head.embedding_VH)
        model.lm_head.weight.copy_(rows)
        model.verifier_lm_head.weight.copy_(rows)
        model.verifier_norm.weight.fill_(1.0)
    return model


def compare(
    core: Any,
    config: LossConfig,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    kept: torch.Tensor | None = None,
    head: TinyHead | None = None,
    model: Any = None,
) -> None:
    """Loss, gradient of every parameter, and metrics, of the blocks at ANCHORS of two packed documents. model: theirs, ready-made."""
    drafter, head, batch = tiny_drafter(**changes), head or TinyHead(), make_batch(DOCUMENTS, 32)
    if kept is not None:
        drafter.d2t.copy_(offsets(kept))
    anchors = torch.tensor(ANCHORS)
    monkeypatch.setattr(step, "draw_anchors", lambda *_, **__: Anchors(anchors, torch.ones(len(anchors), dtype=torch.bool)))
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool)))
    row = row_loss(
        drafter, drafter.spec, head, batch, config, CPU32, StepSeeds.at(0, 0, 0, 0, CPU32.device), None, draft_head(head.head, drafter.d2t)
    )
    row.loss.backward()

    from speculators.losses import resolve_loss_config

    model = model or theirs(core, drafter, head)
    terms = {NAMES[name]: factor for name, factor in config.factors.items()}
    functions = {name: (resolve_loss_config(name, "eager")[name][0], factor) for name, factor in terms.items()}
    model._create_mask_fn = lambda *args, **kwargs: core.create_float_mask(*args, **kwargs, dtype=torch.float32)
    _, loss, metrics = model(
        hidden_states=batch.features.flatten(1).float()[None],
        input_ids=batch.input_ids_T[None],
        loss_mask=batch.loss_mask_T[None],
        verifier_last_hidden_states=batch.verifier.float()[None],
        document_ids=batch.document_T[None],
        position_ids=batch.position_T[None].long(),
        loss_config=functions,
        gamma=config.gamma,
        max_anchors=len(ANCHORS),
        per_position_loss_weight="dpace" if config.position_weights == "dpace" else "fixed-exp-decay",
        dpace_alpha=config.dpace_alpha,
    )
    slots = len(ANCHORS) * drafter.spec.num_drafted
    assert int(row.sums.counts.count_S.sum()) == slots  # every drafted slot is supervised, so that only the divisors differ
    total = loss * (slots + 1e-5)
    assert float(row.sums.loss_sum) == pytest.approx(total.item(), rel=1e-4)
    total.backward()
    names = dict(model.named_parameters())
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, names[name].grad, atol=2e-4, rtol=2e-3, msg=lambda text, n=name: f"{n}: {text}")
    ours = quality(row.sums.counts)
    assert float(metrics["eal_sum"] / metrics["eal_total"]) == pytest.approx(ours.tau)
    assert float(metrics["full_acc_sum"] / metrics["full_acc_total"]) == pytest.approx(ours.accuracy)


@pytest.mark.parametrize("weights", ["exp", "dpace"])
@pytest.mark.parametrize("label", ["teacher", "soft"])
def test_losses_gradients_and_metrics_are_those_of_speculators(library: Any, monkeypatch: pytest.MonkeyPatch, label: str, weights: str):
    terms = {"ce": 1.0} if weights == "dpace" else None
    compare(library, LossConfig(label=label, terms=terms, position_weights=weights, gamma=2.0, dpace_alpha=0.3), {}, monkeypatch)


@pytest.mark.parametrize("terms", [{name: 1.0} for name in NAMES] + [{"ce": 0.1, "tv": 0.9}])
def test_every_term_is_that_of_speculators(library: Any, monkeypatch: pytest.MonkeyPatch, terms: dict[str, float]):
    compare(library, LossConfig(label="soft", terms=terms), {}, monkeypatch)


@pytest.mark.parametrize("label", ["teacher", "soft"])
def test_drafting_from_the_anchor_is_that_of_speculators(library: Any, monkeypatch: pytest.MonkeyPatch, label: str):
    compare(library, LossConfig(label=label), {"sample_from_anchor": True}, monkeypatch)


@pytest.mark.parametrize("changes", [{"block_size": 6}, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}, {"rope_theta": 1e6}])
def test_other_sizes_agree_too(library: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]):
    compare(library, LossConfig(), changes, monkeypatch)


def test_a_pruned_vocabulary_that_holds_all_labels_gives_its_losses(library: Any, monkeypatch: pytest.MonkeyPatch):
    """With labels outside the definitions part: there it trains towards the best kept token, here the slot carries no loss."""
    head, batch = TinyHead(), make_batch(DOCUMENTS, 32)
    used = torch.unique(head.teacher_tokens(batch.verifier))
    kept = torch.unique(torch.cat((used, torch.arange(4))))
    assert len(kept) < V
    for label in ("teacher", "soft"):
        compare(library, LossConfig(label=label), {"draft_vocab_size": len(kept)}, monkeypatch, kept)


def test_the_kept_tokens_and_both_mappings_are_those_of_speculators(library: Any):
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    generator = torch.Generator().manual_seed(0)
    for size in (1, 5, 12, 31):
        counts = torch.randint(0, 4, (V,), generator=generator)
        frequencies = {token: count for token, count in enumerate(counts.tolist()) if count}
        d2t, t2d = build_vocab_mappings_from_distribution(frequencies, size, V)
        kept = torch.from_numpy(kept_tokens(counts.numpy(), size))
        assert torch.equal(offsets(kept), d2t)
        assert torch.equal(is_kept(offsets(kept), V), t2d)


def test_what_a_config_leaves_out_is_qwen3s_default():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    own = Qwen3Config()
    assert {name: getattr(own, name) for name in DEFAULTS if name != "rope_theta"} == {n: v for n, v in DEFAULTS.items() if n != "rope_theta"}
    assert own.rope_parameters["rope_theta"] == DEFAULTS["rope_theta"]


KEPT = torch.tensor([0, 1, 2, 3, 5, 8, 9, 13, 21, 30])


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, None),
        ({"rope_theta": 1e6, "block_size": 6}, None),
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}, None),
        ({"draft_vocab_size": len(KEPT)}, KEPT),
    ],
)
def test_the_library_loads_an_export_and_its_loss_is_ours(
    library: Any, write_cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], kept: torch.Tensor | None
):
    """Config, weights and the target's matrices all come from the folder alone."""
    drafter = tiny_drafter(**changes)
    if kept is not None:
        drafter.d2t.copy_(offsets(kept))
    state = CheckpointState(step=1, epoch=0, row=0, config=TrainConfig(), drafter=drafter.spec)
    checkpoint.save(tmp_path / "run", state, drafter.state_dict(), {}, 1)
    folder = tmp_path / "drafter"
    export(tmp_path / "run", folder, "float32", format="speculators", cache=write_cache()[0])

    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(str(folder), config=config).float()
    assert (config.block_size, config.mask_token_id, config.aux_hidden_state_layer_ids) == (drafter.spec.block_size, 3, [2, 3, 5])
    assert config.speculators_config.proposal_methods[0].speculative_tokens == drafter.spec.block_size - 1
    assert config.transformer_layer_config.rope_parameters["rope_theta"] == drafter.spec.rope_theta
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in drafter.state_dict().items())
    model.save_pretrained(tmp_path / "theirs")
    back = load_drafter(tmp_path / "theirs", drafter.spec.num_target_layers)
    assert back.spec == drafter.spec
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in back.state_dict().items())
    assert {finding.code for finding in lint(tmp_path / "theirs").findings} == {"verifier", "head-missing"}  # none is named, and it leaves these out
    head = TinyHead()
    head.embedding_VH, head.head = found["embed_tokens.weight"], Head(load_file(tmp_path / "cache/target/head.safetensors")["lm_head.weight"].float())
    with torch.no_grad():
        model.verifier_norm.weight.fill_(1.0)
        model.verifier_lm_head.weight.copy_(found["lm_head.weight"])
    if kept is None:
        compare(library, LossConfig(label="soft"), changes, monkeypatch, head=head, model=model)
    else:
        assert torch.equal(found["t2d"], is_kept(drafter.d2t, V))
        assert torch.equal(found["lm_head.weight"], head.head.weight_VH[kept])
