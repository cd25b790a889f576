"""`dflash export --check`: our own folders are clean, and each fault, planted once, is found, alone, under its own name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rows import tiny_drafter
from safetensors.torch import load_file, save_file

from dflash_cache.cli import main
from dflash_cache.common.errors import InputError
from dflash_cache.train import checkpoint, lint_config
from dflash_cache.train.checkpoint import CheckpointState
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.draft_head import offsets
from dflash_cache.train.drafter_folder import load_drafter
from dflash_cache.train.export import export
from dflash_cache.train.lint import LintReport, lint

KEPT = torch.tensor([0, 3, 5, 8, 9])
SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 5}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}


MADE: dict[str, dict[str, bytes]] = {}
"""Exports, each made once: the files by name."""


@pytest.fixture
def folder(tmp_path: Path, write_cache: Any) -> Callable[..., Path]:
    """folder(format, **changes of the drafter): an export, float32."""

    def write(format: str = "zlab", **changes: Any) -> Path:
        at, key = tmp_path / "drafter", f"{format} {changes}"
        if key not in MADE:
            drafter = tiny_drafter(**changes)
            if drafter.d2t is not None:
                drafter.d2t.copy_(offsets(KEPT))
            state = CheckpointState(step=1, epoch=0, row=0, config=TrainConfig(), drafter=drafter.spec)
            checkpoint.save(tmp_path / "run", state, drafter.state_dict(), {}, 1)
            export(tmp_path / "run", tmp_path / "made", "float32", format=format, cache=write_cache(lengths=(10,))[0], model="org/target")
            MADE[key] = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
        at.mkdir()
        for name, content in MADE[key].items():
            (at / name).write_bytes(content)
        return at

    return write


def change(folder: Path, **fields: Any) -> None:
    """Set fields of config.json, `a__b` inside of `a`; ... deletes."""
    document = json.loads((folder / "config.json").read_text())
    for path, value in fields.items():
        *way, name = path.split("__")
        holder = document
        for step in way:
            holder = holder[int(step) if step.isdigit() else step]
        if value is ...:
            del holder[name]
        else:
            holder[name] = value
    (folder / "config.json").write_text(json.dumps(document))


def retensor(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def codes(report: LintReport) -> set[tuple[str, str]]:
    return {(finding.severity, finding.code) for finding in report.findings}


@pytest.mark.parametrize(("format", "changes"), [("zlab", {}), ("zlab", SLIDING), ("speculators", {}), ("speculators", SLIDING)])
def test_our_own_exports_have_nothing_to_find(folder, write_cache, format: str, changes: dict):
    found = lint(folder(format, **changes), cache=write_cache(name="other")[0])
    assert found.findings == ()
    assert found.ok


def test_a_pruned_export_has_nothing_to_find(folder):
    assert lint(folder("speculators", draft_vocab_size=5)).findings == ()


def test_what_is_worth_knowing_of_our_own_exports_is_a_note(folder):
    assert codes(lint(folder("zlab", **MIXED))) == {("note", "mixed-layers")}


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.__setitem__(name, value)


def prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"][3] = float("nan")


def half(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].bfloat16()


BOTH = {"rope_theta": 1e6, "rope_parameters__rope_theta": 1e4}
PLANTED: list[tuple[str, dict[str, Any] | Callable, str, str]] = [
    ("zlab", {"architectures": ["Qwen3ForCausalLM"]}, "error", "architecture"),
    ("zlab", {"model_type": "llama"}, "error", "model-type"),
    ("zlab", {"head_dim": 2}, "error", "tensor-shape"),
    ("zlab", {"rms_norm_eps": ...}, "warning", "size-missing"),
    ("zlab", {"rms_norm_eps": "small"}, "error", "size-wrong"),
    ("zlab", {"hidden_act": "gelu"}, "error", "activation"),
    ("zlab", {"quantization_config": {"quant_method": "fp8"}}, "note", "quantised"),
    ("zlab", {"layer_types": ["full_attention"]}, "error", "layer-types"),
    ("zlab", {"layer_types": ["full_attention", "linear_attention"]}, "error", "layer-types"),
    ("zlab", {"is_causal": True}, "error", "causal"),
    ("zlab", {"is_causal": ..., "dflash_config__causal": True}, "error", "causal"),
    ("zlab", {"rope_theta": ..., "rope_parameters": ...}, "error", "rope-missing"),
    ("zlab", BOTH, "error", "rope-differs"),
    ("zlab", {"rope_theta": ...}, "warning", "rope-spelling"),
    ("zlab", {"rope_parameters": ...}, "note", "rope-spelling"),
    ("zlab", {"rope_parameters__mrope_section": [1, 1]}, "warning", "rope-kind"),
    ("zlab", {"partial_rotary_factor": 0.25}, "warning", "rope-kind"),
    ("zlab", {"rope_parameters__rope_type": "yarn"}, "warning", "rope-kind"),
    ("zlab", {"target_layer_ids": ..., "dflash_config__target_layer_ids": ...}, "error", "layer-ids-missing"),
    ("zlab", {"target_layer_ids": [1, 2, 3]}, "error", "layer-ids-differ"),
    ("zlab", {"target_layer_ids": [2, 1, 4], "dflash_config__target_layer_ids": [2, 1, 4]}, "error", "layer-ids-order"),
    ("zlab", {"target_layer_ids": [-1, 2, 4], "dflash_config__target_layer_ids": [-1, 2, 4]}, "error", "layer-ids-order"),
    ("zlab", {"target_layer_ids": [1, 2, 6], "dflash_config__target_layer_ids": [1, 2, 6]}, "error", "layer-ids-range"),
    ("zlab", {"target_layer_ids": [2, 3, 4], "dflash_config__target_layer_ids": [2, 3, 4]}, "warning", "layer-ids-shifted"),
    ("zlab", {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "error", "aux-ids"),
    ("zlab", {"num_target_layers": ...}, "error", "depth-missing"),
    ("zlab", {"block_size": ..., "dflash_config__block_size": ...}, "error", "block-missing"),
    ("zlab", {"block_size": 8}, "error", "block-differs"),
    ("zlab", {"block_size": 1, "dflash_config__block_size": 1}, "error", "block-wrong"),
    ("zlab", {"mask_token_id": ..., "dflash_config__mask_token_id": ...}, "error", "mask-missing"),
    ("zlab", {"mask_token_id": 4}, "error", "mask-differs"),
    ("zlab", {"mask_token_id": 32, "dflash_config__mask_token_id": 32}, "error", "mask-range"),
    ("zlab", {"eos_token_id": [9, 3]}, "warning", "mask-special"),
    ("zlab", {"pad_token_id": 3}, "warning", "mask-special"),
    ("zlab", {"dflash_config__sample_from_anchor": True}, "error", "sample-from-anchor"),
    ("zlab", {"draft_vocab_size": 33}, "error", "draft-vocabulary"),
    ("zlab", {"dtype": "bfloat16"}, "warning", "dtype-differs"),
    ("zlab", {"dtype": ...}, "warning", "dtype-differs"),
    ("zlab", drop("norm.weight"), "error", "tensor-missing"),
    ("zlab", put("mask_hidden", torch.zeros(8)), "error", "tensor-unknown"),
    ("zlab", put("fc.weight", torch.zeros(8, 16)), "error", "tensor-shape"),
    ("zlab", prefix, "error", "tensor-prefix"),
    ("zlab", poison, "error", "not-finite"),
    ("zlab", half, "warning", "dtype-mixed"),
    ("zlab", put("d2t", torch.zeros(5, dtype=torch.int64)), "error", "mapping-unasked"),
    ("zlab", put("embed_tokens.weight", torch.zeros(32, 8)), "note", "head-included"),
    ("speculators", {"speculators_model_type": "eagle3"}, "error", "architecture"),
    ("speculators", {"model_type": "qwen3"}, "error", "model-type"),
    ("speculators", {"transformer_layer_config__rms_norm_eps": ...}, "warning", "size-missing"),
    ("speculators", {"sliding_window_non_causal": False}, "error", "causal"),
    ("speculators", {"sample_from_anchor": True, "speculators_config__proposal_methods__0__speculative_tokens": 4}, "error", "sample-from-anchor"),
    ("speculators", {"speculators_config__proposal_methods__0__speculative_tokens": 4}, "error", "speculative-tokens"),
    ("speculators", {"speculators_config": {}}, "error", "speculative-tokens"),
    ("speculators", {"speculators_config__verifier__name_or_path": None}, "warning", "verifier"),
    ("speculators", {"aux_hidden_state_layer_ids": [0, 3, 5]}, "error", "layer-ids-order"),
    ("speculators", {"aux_hidden_state_layer_ids": [2, 3, 7]}, "error", "layer-ids-range"),
    ("speculators", {"aux_hidden_state_layer_ids": [1, 2, 3]}, "warning", "layer-ids-shifted"),
    ("speculators", {"dflash_config": {"target_layer_ids": [2, 3, 5]}}, "error", "aux-ids"),
    ("speculators", drop("lm_head.weight"), "note", "head-missing"),
    ("speculators", put("lm_head.weight", torch.zeros(30, 8)), "error", "matrix-shape"),
    ("pruned", drop("d2t"), "error", "mapping-missing"),
    ("pruned", put("d2t", KEPT), "error", "mapping-values"),
    ("pruned", put("t2d", torch.arange(32) < 5), "error", "mapping-kept"),
    ("pruned", drop("t2d"), "note", "mapping-kept"),
    ("pruned", drop("lm_head.weight"), "error", "head-missing"),
    ("sliding", {"sliding_window": ...}, "error", "window"),
    ("sliding", {"use_sliding_window": False}, "error", "window"),
]


@pytest.mark.parametrize(
    ("kind", "plant", "severity", "code"), PLANTED, ids=[f"{kind} {code} {number}" for number, (kind, _, _, code) in enumerate(PLANTED)]
)
def test_a_planted_fault_is_found_under_its_name_and_nothing_else_is(folder, kind: str, plant: Any, severity: str, code: str):
    changes = {"pruned": {"draft_vocab_size": 5}, "sliding": SLIDING}.get(kind, {})
    at = folder("speculators" if kind in ("speculators", "pruned") else "zlab", **changes)
    assert lint(at).findings == ()
    change(at, **plant) if isinstance(plant, dict) else retensor(at, plant)
    report = lint(at)
    expected = {(severity, code)} | ({("warning", "verifier")} if plant == {"speculators_config": {}} else set())
    assert codes(report) == expected
    assert report.ok is (severity != "error")
    assert all(finding.vllm and finding.sglang and finding.reference for finding in report.findings)


def test_what_engines_would_do_is_said_for_each(folder):
    at = folder()
    retensor(at, put("x", torch.zeros(2)))
    (finding,) = lint(at).findings
    assert (finding.vllm, finding.sglang, finding.reference) == (
        "refuses to start",
        "passes over it, without a word",
        "passes over it, with a warning",
    )


def test_a_count_in_place_of_the_depth_is_named(folder):
    at = folder()
    change(at, num_target_layers=3)
    assert ("error", "depth-is-count") in codes(lint(at))


def test_heads_that_cannot_be_shared_are_found_besides_the_shapes(folder):
    at = folder()
    change(at, num_key_value_heads=3)
    assert {code for _, code in codes(lint(at))} == {"heads", "tensor-shape"}


def test_mixed_layers_have_no_right_value_in_the_speculators_format(folder):
    at = folder("speculators")
    change(at, transformer_layer_config__layer_types=list(MIXED["layer_types"]))
    change(at, transformer_layer_config__sliding_window=5, transformer_layer_config__use_sliding_window=True)
    (finding,) = lint(at).findings
    assert (finding.code, finding.severity) == ("causal", "error")
    assert "no value serves both" in finding.expected


def test_a_pruned_vocabulary_in_the_zlab_format_is_read_by_one_engine(folder):
    at = folder()
    change(at, draft_vocab_size=5)
    retensor(at, put("d2t", offsets(KEPT)))
    assert codes(lint(at)) == {("error", "draft-vocabulary"), ("note", "mapping-kept")}


def test_token_ids_in_place_of_offsets_are_named(folder):
    at = folder("speculators", draft_vocab_size=5)
    retensor(at, put("d2t", KEPT))
    (finding,) = lint(at).findings
    assert "token ids, not offsets" in finding.problem


def test_a_folder_without_weights_is_an_error_and_without_a_config_no_folder(folder):
    at = folder()
    (at / "model.safetensors").unlink()
    assert codes(lint(at)) == {("error", "weights-missing")}
    (at / "config.json").unlink()
    with pytest.raises(InputError, match=r"holds no config.json"):
        lint(at)


def test_an_old_layout_with_everything_at_the_top_is_read(folder):
    at = folder()
    change(at, dflash_config=...)
    assert lint(at).findings == ()


def test_the_layout_of_published_drafters_is_read(folder):
    """Block size at the top, ids and mask token inside, the rotary base flat, and fields of the target's that say nothing."""
    at = folder()
    change(at, block_size=4, dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 2, 4]}, mask_token_id=..., target_layer_ids=...)
    change(at, rope_parameters=..., rope_scaling=None, eos_token_id=1, bos_token_id=0, max_window_layers=2, auto_map={"AutoModel": "dflash.X"})
    assert codes(lint(at)) == {("note", "rope-spelling")}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"hidden_size": 16}, "target-hidden-size"),
        ({"vocab_size": 64}, "target-vocabulary"),
        ({"num_hidden_layers": 8}, "target-depth"),
        ({"rope_theta": 5e5}, "target-rope"),
        ({"eos_token_id": 3}, "mask-special"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_target_has_the_last_word(folder, tmp_path: Path, fields: dict, code: str, nested: bool):
    config = {"hidden_size": 8, "vocab_size": 32, "num_hidden_layers": 6, "rope_theta": 1e4, "eos_token_id": 2, **fields}
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps({"text_config": config} if nested else config))
    assert [finding.code for finding in lint(folder(), tmp_path / "target").findings] == [code]


def test_a_cache_stands_for_its_target(folder, write_cache):
    at = folder()
    assert codes(lint(at, cache=write_cache(name="deep", num_layers=9)[0])) == {("error", "target-depth")}
    change(at, mask_token_id=2, dflash_config__mask_token_id=2)
    assert codes(lint(at, cache=write_cache(name="same")[0])) == {("warning", "mask-special")}


def test_sharded_folders_are_read_by_their_index_and_not_beyond_the_folder(folder, tmp_path: Path):
    at = folder()
    tensors = load_file(at / "model.safetensors")
    parts = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for part in set(parts.values()):
        save_file({name: tensors[name] for name in tensors if parts[name] == part}, at / part)
    (at / "model.safetensors").unlink()
    (at / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert lint(at).findings == ()
    (at / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(parts, "../elsewhere.safetensors")}))
    assert codes(lint(at)) == {("error", "weights-missing")}


JUNK = [None, True, -1, 1.5, 10**30, "x", [], [1, "x"], {}, {"a": 1}]


@pytest.mark.parametrize("value", JUNK, ids=map(str, JUNK))
@pytest.mark.parametrize("format", ["zlab", "speculators"])
def test_no_value_of_any_field_makes_a_rule_or_a_reading_fail(folder, tmp_path: Path, format: str, value: Any):
    at, target = folder(format), tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"hidden_size": 8, "vocab_size": 32, "num_hidden_layers": 6, "rope_theta": 1e4}))
    before = json.loads((at / "config.json").read_text())
    places = [*before, *(f"transformer_layer_config__{name}" for name in before.get("transformer_layer_config", ()))]
    places += [f"{holder}__{name}" for holder in ("dflash_config", "rope_parameters") for name in before.get(holder, ())]
    for place in places:
        change(at, **{place: value})
        lint(at, target).to_text()
        with suppress(InputError):
            load_drafter(at)
        (at / "config.json").write_text(json.dumps(before))


def test_the_command_ends_with_1_on_errors_and_prints_them(folder):
    at = folder()
    clean = CliRunner().invoke(main, ["export", "--check", str(at)])
    assert clean.exit_code == 0
    assert "0 errors, 0 warnings, 0 notes" in clean.stdout
    change(at, block_size=8)
    found = CliRunner().invoke(main, ["export", "--check", str(at), "--json"])
    assert found.exit_code == 1
    document = json.loads(found.stdout)
    assert (document["ok"], document["errors"]) == (False, 1)
    assert document["findings"][0]["code"] == "block-differs"
    assert "takes 4" in document["findings"][0]["sglang"]
    assert "error    config.json block_size: stands in two places and differs" in CliRunner().invoke(main, ["export", "--check", str(at)]).stdout


def test_a_mask_embedding_of_its_own_is_read_by_one_engine(folder):
    at = folder()
    (at / "mask_embedding.pt").write_bytes(b"")
    assert codes(lint(at)) == {("warning", "mask-embedding")}


def test_every_finding_that_the_rules_can_make_is_planted_in_this_file():
    sources = "".join(path.read_text() for path in Path(lint_config.__file__).parent.glob("lint_*.py"))
    known = set(re.findall(r'finding\(\s*"([a-z0-9-]+)"', sources))
    assert len(known) > 35
    here = Path(__file__).read_text()
    assert [code for code in sorted(known) if f'"{code}"' not in here] == []


@pytest.mark.parametrize("config", [{}, {"hidden_size": 8, "vocab_size": 32}, {"text_config": 3}])
def test_a_target_without_sizes_is_refused_for_nothing_could_be_held_against_it(folder, tmp_path: Path, config: dict):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="does not give the target's sizes"):
        lint(folder(), tmp_path)
