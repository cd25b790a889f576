"""Teacher tokens kept beside the parts: what they are, when they are believed, and that no run learns anything else from them."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner
from ranks import settings, together, train, write
from safetensors.torch import load_file, save_file

from dflash_cache.cli import main
from dflash_cache.common import layout, target_folder
from dflash_cache.common.errors import CacheDamaged, InputError
from dflash_cache.train import checkpoint, teacher_targets
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.inspect_cache import inspect
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.repair import repair
from dflash_cache.train.resolve import dry_run, make_plan
from dflash_cache.train.target_head import TargetHead
from dflash_cache.train.targets import UNKNOWN
from dflash_cache.train.targets_pass import compute, compute_targets, targets_of
from dflash_cache.train.teacher_targets import TeacherTargets
from dflash_cache.train.verify import verify

LENGTHS = [40, 61, 12, 33, 50, 9, 44, 38]
WITHOUT = {"store_targets": False}
KEPT = {"kept": True, "computed_parts": 0}


@pytest.fixture(scope="module")
def plain_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("targets") / "cache", LENGTHS, unsupervised=[4])


@pytest.fixture
def cache(plain_cache: Path, tmp_path: Path) -> Path:
    """A cache of three parts without targets; one sample has nothing to learn from."""
    return Path(shutil.copytree(plain_cache, tmp_path / "cache"))


@pytest.fixture(scope="module")
def without(plain_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that computes the teacher from verifier states, row by row."""
    run = tmp_path_factory.mktemp("without") / "run"
    train(settings(run=WITHOUT), [plain_cache], run)
    assert not (plain_cache / "targets").exists()
    return run


def head_of(cache: Path) -> TargetHead:
    return TargetHead(cache, CacheReader(cache).spec, torch.device("cpu"), torch.float32)


def kept(cache: Path) -> TeacherTargets:
    return targets_of(CacheReader(cache), head_of(cache))


def groups(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "targets").glob("*/*") if not path.name.startswith("."))


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    times = ("seconds", "tokens_per_second")
    return [{k: v for k, v in json.loads(line).items() if k not in times} for line in (run / name).read_text().splitlines()]


def teacher(run: Path, life: int = -1) -> dict[str, Any]:
    found = json.loads((run / "run.json").read_text())["lives"][life]["teacher"]
    return {name: found[name] for name in ("kept", "computed_parts")}


def assert_same_bits(one: Path, other: Path, names: Sequence[str] = ("samples.jsonl", "metrics.jsonl")) -> None:
    for name in names:
        assert lines(one, name) == lines(other, name), name
    ends = [checkpoint.newest(run) for run in (one, other)]
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        ours, theirs = (checkpoint.load_tensors(end, checkpoint.load_state(end), name) for end in ends)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name


def expected_tokens(cache: Path, part: int) -> np.ndarray:
    """The definition, row by row: a token where the next token is supervised, and argmax(head(norm(state))) there."""
    reader, head = CacheReader(cache), head_of(cache)
    found = np.full(reader.parts[part].manifest.tokens, UNKNOWN, np.int32)
    for sample in np.flatnonzero(reader.part_of == part):
        whole, start = reader.read_sample(int(sample)), int(reader.starts[sample])
        for row in range(len(whole)):
            if whole.loss_mask[row + 1] if row + 1 < len(whole) else whole.next_token >= 0:
                state = torch.from_numpy(whole.verifier_last_hidden_states[row : row + 1].view(np.int16)).view(torch.bfloat16)
                found[start + row] = int(head.teacher_logits(state).argmax())
    return found


def test_tokens_are_the_teachers_where_the_next_token_is_supervised_and_zarr_reads_them(cache: Path):
    report = compute_targets(cache, "cpu", "float32")
    parts = [path.name for path in sorted((cache / "parts").iterdir())]
    assert [path.name for path in groups(cache)] == parts
    assert (report.parts, report.computed, report.replaced) == (len(parts), len(parts), 0)
    total = 0
    for number, path in enumerate(groups(cache)):
        array = zarr.open_group(path, mode="r")["teacher_tokens"]
        assert isinstance(array, zarr.Array)
        assert array.dtype == np.int32
        assert np.array_equal(array[...], expected_tokens(cache, number))
        total += int((np.asarray(array[...]) != UNKNOWN).sum())
    assert report.tokens == total
    assert report.head == groups(cache)[0].parent.name


def test_a_last_row_whose_next_token_is_known_has_a_teacher_token(write_cache: Any):
    cache, _, _ = write_cache(lengths=[10, 5], next_token=7)
    compute_targets(cache, "cpu", "float32")
    found = kept(cache).sample(0)
    assert len(found) == 10
    assert found[9] != UNKNOWN
    assert found[:2].tolist() == [UNKNOWN] * 2  # row 2 predicts the first supervised token, 3
    assert (found[2:] != UNKNOWN).all()


def test_rows_have_the_same_token_whatever_the_pieces_that_the_head_gets(cache: Path):
    targets, head = kept(cache), head_of(cache)
    jobs = [(targets, part) for part in range(len(targets.reader.parts))]
    whole = list(compute(jobs, head))
    head.chunk_rows = 1  # eight rows at a time
    passed = []
    assert all(np.array_equal(a, b) for a, b in zip(whole, compute(jobs, head, lambda rows, count: passed.append((rows, count)))))
    assert sum(rows for rows, _ in passed) == targets.reader.num_tokens
    assert sum(count for _, count in passed) == sum(int((tokens != UNKNOWN).sum()) for tokens in whole)


def test_a_run_learns_the_same_to_the_last_bit_with_and_without_and_needs_neither_states_nor_head(
    cache: Path, without: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    train(settings(), [cache], tmp_path / "first")
    assert teacher(without) == {"kept": False, "computed_parts": 0}
    assert teacher(tmp_path / "first") == {"kept": True, "computed_parts": len(groups(cache))}

    def refuse(*_: Any) -> None:
        raise AssertionError("the teacher was computed")

    monkeypatch.setattr(TargetHead, "teacher_logits", refuse)
    for path in (cache / "parts").glob(f"*/{layout.VERIFIER}/*/c/0/0"):  # of the right size, and nothing of it can be read
        path.write_bytes(bytes(path.stat().st_size))
    train(settings(), [cache], tmp_path / "second")
    assert teacher(tmp_path / "second") == KEPT
    assert_same_bits(without, tmp_path / "first")
    assert_same_bits(without, tmp_path / "second")


@pytest.mark.parametrize(("first", "then"), [(False, True), (True, False), (None, None)])
def test_a_resumed_run_is_bit_identical_whether_targets_were_there_or_not(
    cache: Path, without: Path, tmp_path: Path, first: bool | None, then: bool | None
):
    run = tmp_path / "run"
    train(settings(run={"store_targets": first}), [cache], run, stop_after=2)
    if first is not False:
        shutil.rmtree(cache / "targets")
    train(settings(run={"store_targets": then}), [cache], run, True)
    assert_same_bits(without, run)
    assert [teacher(run, life)["kept"] for life in (0, 1)] == [first is not False, then is not False]


def test_several_caches_read_more_than_once_and_cut_documents_learn_the_same(cache: Path, tmp_path: Path):
    other = write(tmp_path / "other", [30, 64, 22], seed=5)
    config = {"data": {"row_tokens": 48, "weights": (1.0, 1.5)}, "loss": {"position_weights": "dpace"}}
    train(settings(**config, run=WITHOUT), [cache, other], tmp_path / "without")
    train(settings(**config), [cache, other], tmp_path / "with")
    assert teacher(tmp_path / "with")["kept"]
    assert_same_bits(tmp_path / "without", tmp_path / "with")


def test_a_pruned_drafter_learns_the_same(cache: Path, tmp_path: Path):
    model = {"draft_vocab_size": 20}
    train(settings(model=model, run=WITHOUT), [cache], tmp_path / "without")
    train(settings(model=model), [cache], tmp_path / "with")
    assert_same_bits(tmp_path / "without", tmp_path / "with")


@pytest.mark.parametrize("label", ["teacher", "soft", "data"])
def test_evaluation_during_training_gives_the_same_numbers(cache: Path, tmp_path: Path, label: str):
    config = {"data": {"row_tokens": 64, "eval_fraction": 0.4}, "loss": {"label": label, "anchors_per_row": 8}, "eval": {"every": 3}}
    train(settings(**config, run=WITHOUT), [cache], tmp_path / "without")
    compute_targets(cache, "cpu", "float32")
    train(settings(**config), [cache], tmp_path / "with")
    assert_same_bits(tmp_path / "without", tmp_path / "with", ("samples.jsonl", "metrics.jsonl", "eval.jsonl"))


def test_several_processes_share_the_parts_and_take_the_same_steps(cache: Path, without: Path, tmp_path: Path):
    config = settings(distributed={"mode": "ddp"})
    together(2, train, config, [cache], tmp_path / "two")
    assert teacher(tmp_path / "two") == {"kept": True, "computed_parts": len(groups(cache))}
    for number in range(len(groups(cache))):
        assert np.array_equal(kept(cache)._of_part(number), expected_tokens(cache, number))
    assert (tmp_path / "two/samples.jsonl").read_text() == (without / "samples.jsonl").read_text()
    assert [line["loss"] for line in lines(tmp_path / "two", "metrics.jsonl")] == pytest.approx(
        [line["loss"] for line in lines(without, "metrics.jsonl")], rel=1e-6
    )


def alone(config: dict[str, Any], cache: Path, folder: Path) -> str:
    """One of several trainings that know nothing of each other."""
    out = folder / os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    train(config, [cache], out)
    return str(out)


def test_two_trainings_at_once_keep_one_set_and_learn_the_same(cache: Path, without: Path, tmp_path: Path):
    for run in together(2, alone, settings(), cache, tmp_path):
        assert teacher(Path(run))["kept"]
        assert_same_bits(without, Path(run))
    assert not [path.name for path in (cache / "targets").glob("*/.*")]


def test_many_that_publish_one_part_at_once_leave_it_whole(cache: Path):
    compute_targets(cache, "cpu", "float32")
    (groups(cache)[0] / "zarr.json").write_text("{}")
    tokens, failed = expected_tokens(cache, 0), []

    def publish() -> None:
        try:
            kept(cache).publish(0, tokens)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert kept(cache).is_whole(0)
    assert not [path.name for path in (cache / "targets").glob("*/.*")]


def test_what_a_killed_process_half_wrote_is_ignored_and_goes_when_it_is_old(cache: Path):
    folder = kept(cache).folder
    for name in (".00000000-0000.77.0123abcd", ".00000000-0000.78.0123abcd"):
        shutil.copytree(cache / "parts/00000000-0000/input_ids", folder / name / "teacher_tokens")
    hours_ago = time.time() - 2 * teacher_targets.LEFT_OVER_SECONDS
    os.utime(folder / ".00000000-0000.77.0123abcd", (hours_ago, hours_ago))
    assert not inspect(cache).targets
    assert compute_targets(cache, "cpu", "float32").computed == len(CacheReader(cache).parts)
    assert [path.name for path in folder.glob(".*")] == [".00000000-0000.78.0123abcd"]  # perhaps somebody is at it
    assert verify(cache, teacher=False).ok


def test_another_head_type_or_device_has_targets_of_its_own(cache: Path, tmp_path: Path):
    first, half = compute_targets(cache, "cpu", "float32"), compute_targets(cache, "cpu", "bfloat16")
    assert len({first.head, half.head}) == 2
    before = expected_tokens(cache, 0)
    path = cache / "target" / layout.HEAD_FILE
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].flip(0).contiguous()}, path)
    target_folder.seal(cache / "target")
    train(settings(), [cache], tmp_path / "run")
    assert teacher(tmp_path / "run") == {"kept": True, "computed_parts": first.parts}
    assert np.array_equal(kept(cache)._of_part(0), np.where(before == UNKNOWN, UNKNOWN, 31 - before))
    assert [(line.usable, line.parts) for line in inspect(cache).targets].count((True, first.parts)) == 1


DAMAGE = ("zarr.json", "teacher_tokens/zarr.json", "teacher_tokens/c/0")


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("how", ["flipped", "shorter", "gone"])
def test_damage_is_named_by_verify_never_read_and_computed_again_by_training(
    cache: Path, without: Path, tmp_path: Path, name: str, how: str, capsys: pytest.CaptureFixture[str]
):
    compute_targets(cache, "cpu", "float32")
    damaged = groups(cache)[1] / name
    data = bytearray(damaged.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
    damaged.write_bytes(data if how == "flipped" else data[:-1])
    if how == "gone":
        damaged.unlink()
    with pytest.raises(CacheDamaged, match=r"dflash targets CACHE"):
        kept(cache)._of_part(1)
    report = verify(cache, teacher=False)
    assert report.damaged == [f"targets/{damaged.relative_to(cache / 'targets').parts[0]}/00000001-0000"]
    assert report.targets == len(groups(cache)) - 1
    train(settings(), [cache], tmp_path / "run")
    assert "1 of them computed now (1 had been damaged)" in capsys.readouterr().err
    assert_same_bits(without, tmp_path / "run")
    assert verify(cache, teacher=False).ok


def test_damage_that_comes_while_a_run_reads_ends_it_by_name(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compute_targets(cache, "cpu", "float32")
    whole = TeacherTargets.is_whole
    spoiled = groups(cache)[0] / "teacher_tokens/c/0"

    def then_spoil(self: TeacherTargets, part: int) -> bool:
        answer = whole(self, part)
        if part == len(self.reader.parts) - 1:
            spoiled.write_bytes(bytes(spoiled.stat().st_size))
        return answer

    monkeypatch.setattr(TeacherTargets, "is_whole", then_spoil)
    with pytest.raises(CacheDamaged, match="00000000-0000/teacher_tokens/c/0: is not as it was written"):
        train(settings(), [cache], tmp_path / "run")


def test_tokens_of_a_replaced_part_are_stale_not_wrong_and_made_anew(cache: Path, tmp_path: Path):
    """Part 1 goes and another comes under its name, as after a repair: its old targets are of no use, and no error."""
    compute_targets(cache, "cpu", "float32")
    other = write(tmp_path / "other", LENGTHS, unsupervised=[4], seed=9)  # the same lengths and masks
    shutil.rmtree(cache / "parts/00000001-0000")
    shutil.copytree(other / "parts/00000001-0000", cache / "parts/00000001-0000")
    shutil.rmtree(cache / "parts/00000002-0000")
    report = verify(cache, teacher=False)
    assert not [problem for problem in report.problems if "targets" in problem.place]
    assert (report.targets, report.stale_targets) == (len(groups(cache)) - 2, 2)
    assert [(line.parts, line.of_parts, line.stale) for line in inspect(cache).targets] == [(len(groups(cache)) - 2, len(groups(cache)) - 1, 2)]
    assert compute_targets(cache, "cpu", "float32").computed == 1
    assert np.array_equal(kept(cache)._of_part(1), expected_tokens(cache, 1))


def test_repair_moves_damaged_targets_and_nothing_is_to_be_extracted(cache: Path, make: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dflash_cache.train.repair.verify", lambda path: verify(path, teacher=False))
    compute_targets(cache, "cpu", "float32")
    (groups(cache)[2] / "teacher_tokens/c/0").write_bytes(b"")
    report = repair(cache)
    assert [moved.to for moved in report.moved] == ["quarantine/00000002-0000"]
    assert "dflash targets" in report.to_text()
    assert "dflash extract" not in report.to_text()
    assert len(list((cache / "parts").iterdir())) == len(groups(cache)) + 1


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_cache_that_takes_no_targets_is_trained_on_as_before(
    cache: Path, without: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (cache / "targets").write_text("") if kind == "file" else (cache / "targets").symlink_to(elsewhere)
    train(settings(), [cache], tmp_path / "run")
    assert "so that none are kept" in capsys.readouterr().err
    assert teacher(tmp_path / "run") == {"kept": False, "computed_parts": 0}
    assert_same_bits(without, tmp_path / "run")
    assert not list(elsewhere.iterdir())
    with pytest.raises(InputError, match="cannot be written"):
        compute_targets(cache, "cpu", "float32")
    assert verify(cache, teacher=False).damaged == ["targets"]


def test_a_disk_that_fills_up_while_targets_are_kept_stops_no_run(
    cache: Path, without: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    whole = TeacherTargets.publish

    def full(self: TeacherTargets, part: int, tokens: np.ndarray) -> int:
        if part == 2:
            raise OSError(28, "No space left on device")
        return whole(self, part, tokens)

    monkeypatch.setattr(TeacherTargets, "publish", full)
    train(settings(), [cache], tmp_path / "run")
    assert "(No space left on device), so that no more are kept" in capsys.readouterr().err
    assert teacher(tmp_path / "run") == {"kept": False, "computed_parts": 2}
    assert_same_bits(without, tmp_path / "run")


@pytest.mark.parametrize(("sections", "stores"), [
    ({"optim": {"steps": None, "epochs": 1.0}}, True),
    ({"optim": {"steps": None, "epochs": 0.9}}, False),
    ({"optim": {"steps": 1, "accumulate_rows": 1}}, False),
    ({"optim": {"steps": 50, "accumulate_rows": 1}}, True),
    ({"optim": {"steps": 2, "accumulate_rows": None, "accumulate_tokens": 143}}, False),
    ({"optim": {"steps": 2, "accumulate_rows": None, "accumulate_tokens": 144}}, True),
    ({"optim": {"steps": 1, "accumulate_rows": 1}, "run": {"store_targets": True}}, True),
    ({"optim": {"steps": 50, "accumulate_rows": 1}, "run": WITHOUT}, False),
    ({"loss": {"label": "soft"}}, False),
    ({"loss": {"label": "data"}}, False),
])  # fmt: skip
def test_targets_are_stored_when_labels_are_teacher_tokens_and_all_data_is_read(cache: Path, sections: dict[str, Any], stores: bool):
    """287 tokens."""
    plan = make_plan(TrainConfig.model_validate(settings(**sections)), [cache])
    assert plan.facts.tokens == 287
    assert plan.stores_targets == stores
    assert plan.to_dict()["targets"] == {"store": stores, "kept": []}


def test_a_short_run_stores_nothing_and_says_so(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(settings(optim={"steps": 1, "accumulate_rows": 1}), [cache], tmp_path / "run")
    assert "computed from verifier states: the run does not read all of its data" in capsys.readouterr().err
    assert not (cache / "targets").exists()


def test_storing_for_a_label_that_asks_for_no_teacher_token_is_refused():
    with pytest.raises(ValueError, match=r"run.store_targets=true keeps the teacher's tokens, and label soft"):
        TrainConfig.model_validate({"loss": {"label": "soft"}, "run": {"store_targets": True}})


def test_dry_run_and_inspect_tell_what_is_kept(cache: Path):
    parts = compute_targets(cache, "cpu", "float32").parts
    shutil.rmtree(groups(cache)[-1])
    (line,) = dry_run(TrainConfig.model_validate(settings()), [cache])["targets"]["kept"]
    assert (line["parts"], line["of_parts"], line["products"], line["device"], line["usable"]) == (parts - 1, parts, "float32", "cpu", True)
    assert f"targets      {parts - 1} of {parts} parts" in inspect(cache).to_text()
    assert inspect(cache).to_dict()["targets"][0]["bytes"] > 0


def test_the_command_computes_only_what_is_missing_and_answers_in_json(cache: Path):
    def ask() -> dict[str, Any]:
        result = CliRunner().invoke(main, ["targets", str(cache), "--device", "cpu", "--dtype", "float32", "--json"], catch_exceptions=False)
        assert result.exit_code == 0
        return json.loads(result.stdout)

    parts = len(CacheReader(cache).parts)
    assert ask()["computed"] == parts
    shutil.rmtree(groups(cache)[0])
    assert ask()["computed"] == 1
    assert ask()["computed"] == 0
    assert CliRunner().invoke(main, ["targets", str(cache / "nothing")]).exit_code == 2
