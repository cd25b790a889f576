"""The doctor: every planted fault gets its diagnosis, a sound folder none; engines are played by the plain forward with a convention changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import periodic
import pytest
import torch
from click.testing import CliRunner
from periodic import trained
from plants import FAULTY, PLANTS, SILENT, WINDOWED, config, engine, tensors
from safetensors.torch import load_file, save_file

from dflash_cache.cli import main
from dflash_cache.common.errors import InputError, RunFailed
from dflash_cache.train import checkpoint
from dflash_cache.train.conventions import Conventions
from dflash_cache.train.doctor import Answer, Request, diagnose
from dflash_cache.train.export import export


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("windowed"), layer_types=("sliding_attention",), sliding_window=7)


@pytest.fixture
def exported(full: Path, tmp_path: Path) -> Path:
    export(full / "run", tmp_path / "drafter")
    return tmp_path / "drafter"


def check(made: Path, folder: Path, **options: object):
    return diagnose(made / "held-out", folder, made / "run", device="cpu", **options)


def test_a_sound_folder_drafts_what_the_trainer_drafts(full: Path, exported: Path):
    found = check(full, exported)
    assert found.ok
    assert [way.name for way in found.ways] == ["trainer", "folder"]
    assert found.ways[0].tau == found.ways[1].tau > 3.8
    assert found.ways[1].agreement > 0.99
    assert "agree: the trainer's step and the folder" in found.to_text()
    json.dumps(found.to_dict())


@pytest.mark.parametrize("name", ["norm.weight", "fc.weight", "layers.0.self_attn.k_proj.weight", "layers.0.mlp.down_proj.weight"])
@pytest.mark.parametrize("shape", [(), (3,), (3, 5)])
def test_tensors_of_another_shape_are_refused_by_name(full: Path, exported: Path, name: str, shape: tuple[int, ...]):
    tensors = load_file(exported / "model.safetensors")
    save_file({**tensors, name: torch.zeros(shape)}, exported / "model.safetensors")
    with pytest.raises(InputError, match=rf"(?s)other shapes.*{name}"):
        check(full, exported)


@pytest.mark.parametrize("offsets", [torch.tensor([10**12]), torch.tensor([-1]), torch.zeros(3), torch.tensor(1)])
def test_a_pruned_vocabulary_that_leads_to_no_tokens_is_refused(full: Path, exported: Path, offsets: torch.Tensor):
    save_file({**load_file(exported / "model.safetensors"), "d2t": offsets}, exported / "model.safetensors")
    with pytest.raises(InputError, match="d2t, whose offsets lead to no tokens"):
        check(full, exported)


def test_a_mask_token_that_the_target_lacks_is_refused(full: Path, exported: Path):
    config = json.loads((exported / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = config["mask_token_id"] = config["vocab_size"]
    (exported / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="names a mask token that the target lacks"):
        check(full, exported)


@pytest.mark.parametrize(("plant", "expected"), PLANTS.values(), ids=PLANTS)
def test_a_planted_fault_is_named_and_explains_the_whole_gap(full: Path, exported: Path, plant: Callable[[Path], None], expected: str):
    plant(exported)
    found = check(full, exported)
    (parting,) = found.partings
    assert not found.ok
    assert [expected in cause.change for cause in parting.causes] == [True]
    assert parting.explained
    assert abs(parting.left.difference) < 0.05
    assert "PART" in found.to_text()


@pytest.mark.parametrize(("plant", "expected"), SILENT.values(), ids=SILENT)
def test_a_fault_that_does_not_show_on_these_documents_is_named_all_the_same(
    full: Path, exported: Path, plant: Callable[[Path], None], expected: str
):
    plant(exported)
    found = check(full, exported)
    assert not found.ok
    assert [expected in difference for difference in found.differences] == [True]
    assert "DIFFERS from the run, without effect on these documents" in found.to_text()


@pytest.mark.parametrize(("plant", "expected"), WINDOWED.values(), ids=WINDOWED)
def test_a_window_or_its_causality_served_otherwise_is_named(windowed: Path, tmp_path: Path, plant: Callable[[Path], None], expected: str):
    export(windowed / "run", tmp_path / "drafter")
    assert check(windowed, tmp_path / "drafter").ok
    plant(tmp_path / "drafter")
    found = check(windowed, tmp_path / "drafter")
    assert not found.ok
    assert any(expected in name for name in found.differences)


def test_two_faults_at_once_are_both_named(full: Path, exported: Path):
    config(rope_theta=1e6)(exported)
    config(mask_token_id=2)(exported)
    (parting,) = check(full, exported).partings
    assert sorted(cause.change.split()[0] for cause in parting.causes) == ["mask_token_id", "rope_theta"]
    assert parting.explained


def test_stale_weights_are_traced_to_their_checkpoint(full: Path, tmp_path: Path):
    export(checkpoint.list_checkpoints(full / "run")[0], tmp_path / "drafter")
    found = check(full, tmp_path / "drafter")
    assert "the folder holds those of step-00000050/model.safetensors" in found.differences[0]


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (config(rope_theta=100.0), "rope_theta 10000, the target's own, not 100"),
        (config(target_layer_ids=[2, 3, 4]), "layers 1,2,3, not 2,3,4"),
        (PLANTS["fc columns reversed"][0], "layers in the order 3,2,1"),
    ],
    ids=["rope_theta", "layer ids", "columns"],
)
def test_without_a_run_the_reading_that_drafts_better_is_found(full: Path, exported: Path, plant: Callable[[Path], None], expected: str):
    plant(exported)
    found = diagnose(full / "held-out", exported, device="cpu")
    assert found.ways[0].tau < 2
    assert [cause.change for cause in found.partings[-1].causes] == [expected]


def test_without_a_run_a_sound_folder_has_no_better_reading(full: Path, exported: Path):
    assert diagnose(full / "held-out", exported, device="cpu").ok


def test_a_sound_engine_agrees_and_its_own_counters_are_shown(full: Path, exported: Path):
    found = check(full, exported, serve=engine(full, exported))
    assert found.ok
    assert [way.name for way in found.ways] == ["trainer", "folder", "engine"]
    assert found.ways[2].tau == found.ways[1].tau
    assert f"{found.ways[2].tau:.3f}" in found.notes[0]


@pytest.mark.parametrize(("changed", "expected"), FAULTY.values(), ids=FAULTY)
def test_an_engine_that_reads_the_folder_otherwise_is_understood(full: Path, exported: Path, changed: dict[str, object], expected: str):
    found = check(full, exported, serve=engine(full, exported, **changed))
    parting = found.partings[1]
    assert (found.partings[0].parts, parting.parts, parting.explained) == (False, True, True)
    assert parting.causes[0].change == expected
    assert parting.agreement_left == 1.0


def test_answers_that_leave_the_cached_text_are_compared_up_to_there(full: Path, exported: Path):
    found = check(full, exported, serve=engine(full, exported, wrong_after=20))
    assert found.ok
    assert found.differing_answers == 6
    assert found.ways[0].steps == found.ways[2].steps == 6 * 5  # 19 tokens after the first, 4 at a time
    assert "leave the cached text" in found.to_text()


def test_an_engine_that_writes_something_else_at_once_is_an_error(full: Path, exported: Path):
    with pytest.raises(InputError, match="6 of 6 answers differ at once"):
        check(full, exported, serve=engine(full, exported, wrong_after=1))


def test_an_engine_that_does_not_serve_is_a_finding(full: Path, exported: Path):
    def dies(requests: Sequence[Request]) -> list[Answer]:
        raise RunFailed("no such tensor", place="vLLM")

    found = check(full, exported, serve=dies)
    assert not found.ok
    assert "the engine does not serve the folder: no such tensor" in found.to_text()


def test_a_folder_that_no_engine_loads_is_refused(full: Path, exported: Path, tmp_path: Path):
    with pytest.raises(InputError, match="is no exported drafter"):
        check(full, full / "run")
    tensors(lambda found: {"fc.weight": found["fc.weight"][:, :32]})(exported)
    with pytest.raises(InputError, match=r"fc\.weight with 32 columns"):
        check(full, exported)


def test_what_the_cache_does_not_hold_is_said_to_be_untried(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(periodic, "LAYERS", (1, 2, 3))
    periodic.write(tmp_path / "held-out", 5, seed=9)
    export(full / "run", tmp_path / "drafter")
    config(target_layer_ids=[2, 3, 4])(tmp_path / "drafter")
    found = diagnose(tmp_path / "held-out", tmp_path / "drafter", full / "run", device="cpu")
    assert "the cache lacks [4], which are zeros here" in found.notes[0]
    assert "layer_ids 1,2,3 as trained" in found.partings[0].causes[0].change
    assert any("layer ids shifted" in reason for reason in found.untried)


def test_a_changed_default_of_the_conventions_is_not_mistaken_for_the_trainers():
    """What the trainer never does stays off by default: nothing normed, no shift, raw embeddings."""
    defaults = {name: field.default for name, field in Conventions.__dataclass_fields__.items() if not repr(field.default).startswith("<")}
    assert defaults["first_slot"] == 1
    assert not any(defaults[name] for name in ("position_offset", "own_row", "normed_last", "interleaved_rope"))
    assert defaults["embedding_scale"] == 1.0


def test_the_command_ends_with_1_when_ways_part_and_with_0_when_they_agree(full: Path, exported: Path):
    where = ["doctor", "--cache", str(full / "held-out"), "--run", str(full / "run"), "--drafter", str(exported), "--device", "cpu"]
    sound = CliRunner().invoke(main, [*where, "--json"])
    assert (sound.exit_code, json.loads(sound.stdout)["agree"]) == (0, True)
    config(rope_theta=100.0)(exported)
    broken = CliRunner().invoke(main, where)
    assert broken.exit_code == 1
    assert "diagnosis: rope_theta 10000 as trained, where the folder says 100" in broken.stdout
    lonely = CliRunner().invoke(main, [*where, "--engine", "vllm"])
    assert lonely.exit_code == 2
    assert "--engine, --model: are given together" in lonely.stderr
