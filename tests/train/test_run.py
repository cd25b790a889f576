"""A whole run from a cache on disk, its folder, and everything that is refused before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import config

from dflash_cache.common.errors import DiskFull, InputError
from dflash_cache.train import checkpoint
from dflash_cache.train.resolve import dry_run, make_plan
from dflash_cache.train.run import run


def test_a_run_writes_its_record_its_log_and_its_checkpoints(write_cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cache, spec, _ = write_cache()
    summary = run(config(), [cache], tmp_path / "run")
    assert summary.steps == 4
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["loss"]["gamma"] == 4.0
    (kept,) = record["caches"]
    assert {name: kept[name] for name in ("fingerprint", "samples", "tokens")} == {"fingerprint": spec.fingerprint, "samples": 6, "tokens": 110}
    assert record["drafter"]["target_layer_ids"] == [1, 2, 4]
    assert {"torch", "dflash-cache"} <= set(record["lives"][0]["versions"])
    assert summary.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000004"
    assert checkpoint.load_state(summary.checkpoint).config.loss.gamma == 4.0
    printed = capsys.readouterr()
    assert printed.out == ""
    for text in ("gamma 4.0", "blocks 1, 2, 4 of 6", "3 x 8 -> 8", "mask token 0", "512 a document"):
        assert text in printed.err


def test_fc_is_over_all_selected_layers(write_cache, tmp_path: Path):
    cache, _, _ = write_cache()
    summary = run(config(model={"target_layer_ids": [4, 2]}, optim={"steps": 1}), [cache], tmp_path / "run")
    state = checkpoint.load_state(summary.checkpoint)
    assert checkpoint.load_tensors(summary.checkpoint, state, checkpoint.MODEL)["fc.weight"].shape == (8, 16)
    assert state.drafter.target_layer_ids == (2, 4)


def test_a_run_cut_short_and_resumed_ends_bit_identical(write_cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache, _, _ = write_cache()
    settings = config(optim={"steps": 7})
    run(settings, [cache], tmp_path / "straight")
    from dflash_cache.train.trainer import Trainer

    whole = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self: whole(self, stop_after=3))
    run(settings, [cache], tmp_path / "parts")
    monkeypatch.setattr(Trainer, "train", whole)
    run(settings, [cache], tmp_path / "parts", resume=True)
    ends = [checkpoint.newest(tmp_path / name) for name in ("straight", "parts")]
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes()


@pytest.mark.parametrize("label", ["teacher", "data", "soft"])
@pytest.mark.parametrize("mantissa_bits", [7, 3])
def test_every_label_trains_from_a_cache(write_cache, tmp_path: Path, label: str, mantissa_bits: int):
    cache, _, _ = write_cache(mantissa_bits=mantissa_bits)
    assert run(config(loss={"label": label}), [cache], tmp_path / "run").loss > 0


def test_several_caches_of_one_target_train_together(write_cache, tmp_path: Path):
    first, _, _ = write_cache(name="one")
    second, _, _ = write_cache(name="two", seed=5)
    assert run(config(), [first, second], tmp_path / "run").steps == 4


def test_caches_of_other_targets_are_refused_with_the_difference_named(write_cache):
    first, _, _ = write_cache(name="one")
    second, _, _ = write_cache(name="two", vocab=64)
    with pytest.raises(InputError, match=r"target\.vocab_size: .*one has 32, .*two has 64"):
        make_plan(config(), [first, second])


def test_caches_with_other_layers_are_refused_unless_common_layers_are_chosen(write_cache):
    first, _, _ = write_cache(name="one")
    second, _, _ = write_cache(name="two", layer_ids=(2, 4))
    with pytest.raises(InputError, match=r"layer_ids: .*\[1, 2, 4\].*\[2, 4\]"):
        make_plan(config(), [first, second])
    assert make_plan(config(model={"target_layer_ids": [2, 4]}), [first, second]).drafter.target_layer_ids == (2, 4)


def test_a_folder_that_holds_something_is_not_written_to(write_cache, tmp_path: Path):
    cache, _, _ = write_cache()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something already"):
        run(config(), [cache], tmp_path / "run")


def test_resuming_nothing_is_a_user_error(write_cache, tmp_path: Path):
    cache, _, _ = write_cache()
    with pytest.raises(InputError, match="no run to resume"):
        run(config(), [cache], tmp_path / "run", resume=True)


def test_resuming_with_another_setting_or_other_data_is_refused_by_name(write_cache, tmp_path: Path):
    cache, _, _ = write_cache()
    other, _, _ = write_cache(name="other", lengths=[10, 20])
    run(config(), [cache], tmp_path / "run")
    with pytest.raises(InputError, match=r"loss\.gamma: the run has 4\.0, this command has 7\.0"):
        run(config(loss={"gamma": 7.0}), [cache], tmp_path / "run", resume=True)
    with pytest.raises(InputError, match=r"cache 0\.samples: the run has 6, this command has 2"):
        run(config(), [other], tmp_path / "run", resume=True)


def test_a_finished_run_resumed_is_finished(write_cache, tmp_path: Path):
    cache, _, _ = write_cache()
    first = run(config(), [cache], tmp_path / "run")
    assert run(config(), [cache], tmp_path / "run", resume=True).checkpoint == first.checkpoint


def test_a_dry_run_resolves_everything_and_writes_nothing(write_cache, tmp_path: Path):
    cache, _, _ = write_cache()
    before = sorted(path for path in tmp_path.rglob("*"))
    found = dry_run(config(optim={"steps": None, "epochs": 3.0}), [cache])
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert found["gamma"] == 4.0
    assert found["mask_token"] == {"id": 0, "reason": "as configured"}
    assert found["drafter"]["head_dim"] == 4
    assert found["drafter"]["num_target_layers"] == 6
    assert found["data"]["tokens"] == 110
    assert found["data"]["rows"] == 2
    assert found["steps"] == 6
    json.dumps(found)


def test_anchors_and_samples_that_teach_nothing_are_counted(write_cache):
    cache, _, samples = write_cache(lengths=[10, 3, 2, 25], next_token=9)
    facts = make_plan(config(data={"row_tokens": 20}), [cache]).facts
    by_hand = [sum(s.loss_mask[t] and (t + 1 == len(s) or s.loss_mask[t + 1]) for t in range(len(s))) for s in samples]
    assert facts.anchors == sum(by_hand)
    assert facts.samples_cut == 1
    none, _, _ = write_cache(lengths=[10, 1], name="none")
    assert make_plan(config(), [none]).facts.samples_without_anchor == 1


def test_a_cache_without_any_anchor_is_refused(write_cache):
    cache, _, _ = write_cache(lengths=[1, 1])
    with pytest.raises(InputError, match="no sample has an anchor"):
        make_plan(config(), [cache])


def test_a_forced_verifier_layer_is_pointed_out(write_cache, monkeypatch: pytest.MonkeyPatch):
    cache, _, _ = write_cache()
    plan = make_plan(config(), [cache])
    assert plan.warnings() == []
    features = plan.readers[0].spec.settings.features.model_copy(update={"verifier_layer": 4})
    settings = plan.readers[0].spec.settings.model_copy(update={"features": features})
    plan.readers[0].spec = plan.readers[0].spec.model_copy(update={"settings": settings})
    assert "block 4; the target's output is block 5" in plan.warnings()[0]


def test_a_finished_run_resumed_tells_its_last_numbers_again(write_cache, tmp_path: Path):
    cache, _, _ = write_cache()
    first = run(config(), [cache], tmp_path / "run")
    again = run(config(), [cache], tmp_path / "run", resume=True)
    assert (again.steps, again.loss, again.accuracy, again.tau) == (first.steps, first.loss, first.accuracy, first.tau)


def test_rows_extracted_anew_are_other_data_to_a_resumed_run(write_cache, tmp_path: Path):
    """Repair and a second extraction give the same samples in another order; the position in the old order means nothing then."""
    import shutil

    cache, _, _ = write_cache(name="one")
    run(config(optim={"steps": 2}), [cache], tmp_path / "run")
    other, _, _ = write_cache(name="two", seed=9)
    shutil.rmtree(cache)
    other.rename(cache)
    with pytest.raises(InputError, match="parts"):
        run(config(optim={"steps": 2}), [cache], tmp_path / "run", resume=True)


@pytest.mark.parametrize(("code", "error"), [(28, DiskFull), (13, InputError), (30, InputError)])
def test_a_full_or_forbidden_disk_is_said_clearly_and_loses_no_checkpoint(write_cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code, error):
    from dflash_cache.common import atomic

    cache, _, _ = write_cache()
    real, calls = atomic.publish_folder, []

    def second_fails(folder: Path, destination: Path) -> None:
        calls.append(destination)
        if len(calls) == 2:
            raise OSError(code, "not now")
        real(folder, destination)

    monkeypatch.setattr(atomic, "publish_folder", second_fails)
    with pytest.raises(error):
        run(config(), [cache], tmp_path / "run")
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "run")] == ["step-00000002"]
    assert run(config(), [cache], tmp_path / "run", resume=True).steps == 4
