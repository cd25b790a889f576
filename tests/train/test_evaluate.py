"""Offline evaluation: an oracle, a constant drafter, and that chunks and packing change nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from pydantic import ValidationError
from rows import CPU32, Document, TinyHead, make_batch, tiny_drafter
from safetensors.torch import load_file, save_file
from tiny_run import config

from dflash_cache.cli import main
from dflash_cache.common.errors import DflashError, InputError
from dflash_cache.train import evaluate as module
from dflash_cache.train.batch import Batch
from dflash_cache.train.config import EvalConfig
from dflash_cache.train.eval_plot import check_plot, length_bars, plot
from dflash_cache.train.eval_report import EvalResult, bar, report
from dflash_cache.train.evaluate import documents_digest, draft_row, evaluate
from dflash_cache.train.export import export
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.run import run
from dflash_cache.train.seen_before import documents_seen
from dflash_cache.train.split import held_out
from dflash_cache.train.tally import Tally, answer_positions

CPU = EvalConfig(device="cpu", dtype="float32")


@pytest.fixture
def trained(write_cache, tmp_path: Path) -> tuple[Path, Path]:
    """(run, held-out cache)."""
    cache, _, _ = write_cache(name="train")
    run(config(optim={"steps": 3}), [cache], tmp_path / "run")
    held_out, _, _ = write_cache(name="held-out", lengths=[12, 30, 3, 21], seed=9, next_token=7)
    return tmp_path / "run", held_out


def predicting(monkeypatch: pytest.MonkeyPatch, predict) -> None:
    """Replace the drafter's tokens by predict(anchors, carries) -> [A, B-1]."""
    monkeypatch.setattr(module, "_predict", lambda *given: (predict(given[4], given[6].carries_AS), None))


def found_in(batch, chunk: int = 256) -> EvalResult:
    drafter = tiny_drafter()
    found = Tally(drafter.spec)
    with torch.no_grad():
        found.add(batch, [True] * len(batch.sample_ids), *draft_row(drafter, TinyHead(), batch, CPU32, chunk))
    return report(found, CPU)


def test_an_oracle_reaches_the_block_size(monkeypatch: pytest.MonkeyPatch):
    """21 tokens after the prompt, blocks of 4: the first comes with the prefill, then five steps of 4."""
    batch = make_batch([Document(24, supervised=[0] * 3 + [1] * 21)])
    teacher = TinyHead().teacher_tokens(torch.from_numpy(batch_states(batch)))
    offsets = torch.arange(3)
    predicting(monkeypatch, lambda anchors, carries: teacher[(anchors.row_A[:, None] + offsets).clamp(max=23)])
    found = found_in(batch)
    assert (found.walk.steps, found.walk.accepted, found.tau_walk) == (5, 15, 4.0)
    assert found.quality.accuracy == 1.0
    assert found.quality.tau_full == 4.0


def batch_states(batch):
    return batch.verifier.float().numpy()


def test_a_drafter_that_is_never_right_reaches_1(monkeypatch: pytest.MonkeyPatch):
    batch = make_batch([Document(24, supervised=[0] * 3 + [1] * 21)])
    predicting(monkeypatch, lambda anchors, carries: torch.full(carries.shape, -5))
    found = found_in(batch)
    assert (found.walk.steps, found.walk.accepted, found.tau_walk) == (20, 0, 1.0)
    assert found.data_tau_walk == 1.0


def test_the_walk_against_the_text_uses_the_text(monkeypatch: pytest.MonkeyPatch):
    batch = make_batch([Document(24, supervised=[0] * 3 + [1] * 21)])
    following = batch.next_ids_T
    predicting(monkeypatch, lambda anchors, carries: following[(anchors.row_A[:, None] + torch.arange(3)).clamp(max=23)])
    found = found_in(batch)
    assert found.data_tau_walk == 4.0
    assert found.tau_walk < 2


def test_every_valid_anchor_is_drafted_whatever_the_chunks():
    batch = make_batch([Document(24, seed=1), Document(9, seed=2, next_token=5), Document(20, seed=3, supervised=[0] * 19 + [1])], 64)
    results = [found_in(batch, chunk) for chunk in (1, 7, 256)]
    assert results[0] == results[1] == results[2]
    assert results[0].quality.blocks == (22 - 1) + 7
    assert results[0].documents_without_anchor == 1


def test_documents_alone_and_packed_give_the_same():
    documents = [Document(24, seed=1), Document(9, seed=2, next_token=5)]
    packed = found_in(make_batch(documents, 40))
    apart = Tally(tiny_drafter().spec)
    for document in documents:
        batch = make_batch([document])
        with torch.no_grad():
            apart.add(batch, [True], *draft_row(tiny_drafter(), TinyHead(), batch, CPU32, 256))
    assert report(apart, CPU) == packed


def test_a_run_and_its_export_evaluate_to_the_same_acceptance_length(trained: tuple[Path, Path], tmp_path: Path):
    folder, held_out = trained
    export(folder, tmp_path / "drafter", dtype="float32")
    first, second = evaluate(folder, [held_out], CPU), evaluate(tmp_path / "drafter", [held_out], CPU)
    of_the_folder = {"drafter": "", "documents_trained_on": None}
    assert {**first.to_dict(), **of_the_folder} == {**second.to_dict(), **of_the_folder}
    assert (first.documents, first.block_size) == (4, 4)
    assert "acceptance length" in first.to_text()
    assert first.walk_by_source["data.jsonl"] == first.walk


def test_a_limit_takes_the_first_documents(trained: tuple[Path, Path]):
    folder, held_out = trained
    found = evaluate(folder, [held_out], CPU, limit=2)
    assert found.documents == 2
    assert found.quality.blocks == (12 - 4) + (30 - 10)
    whole = evaluate(folder, [held_out], CPU)
    assert whole.quality.blocks == (12 - 4) + (30 - 10) + (3 - 1) + (21 - 7)


def test_a_drafter_of_another_target_is_refused(trained: tuple[Path, Path], write_cache):
    folder, _ = trained
    other, _, _ = write_cache(name="other", vocab=64)
    with pytest.raises(InputError, match="another target"):
        evaluate(folder, [other], CPU)


def test_a_cache_that_lacks_the_drafters_layers_is_refused(trained: tuple[Path, Path], write_cache):
    folder, _ = trained
    other, _, _ = write_cache(name="other", layer_ids=(1, 2))
    with pytest.raises(InputError, match="not all in the cache"):
        evaluate(folder, [other], CPU)


def two_sources() -> Batch:
    """24 and 12 tokens, all but three supervised, from two datasets."""
    documents = [Document(24, supervised=[0] * 3 + [1] * 21), Document(12, seed=4, supervised=[0] * 3 + [1] * 9)]
    return replace(make_batch(documents), sources=("maths.jsonl", "code.jsonl"))


def right_in_the_first_document(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = TinyHead().teacher_tokens(two_sources().verifier)

    def predict(anchors, carries):
        tokens = teacher[(anchors.row_A[:, None] + torch.arange(3)).clamp(max=35)]
        return torch.where((anchors.row_A < 24)[:, None], tokens, -5)

    predicting(monkeypatch, predict)


def test_each_source_has_its_own_numbers(monkeypatch: pytest.MonkeyPatch):
    right_in_the_first_document(monkeypatch)
    found = found_in(two_sources())
    maths, code = found.by_source["maths.jsonl"], found.by_source["code.jsonl"]
    assert (maths["tau_walk"], maths["steps"], maths["tau_full"], maths["documents"]) == (4.0, 5, 4.0, 1)
    assert (code["tau_walk"], code["steps"], code["tau"], code["documents"]) == (1.0, 8, 1.0, 1)
    assert maths["conditional_per_slot"] == [1.0, 1.0, 1.0]
    assert found.walk_by_source["maths.jsonl"].steps + found.walk_by_source["code.jsonl"].steps == found.walk.steps
    assert "maths.jsonl" in found.to_text()


def test_positions_count_from_the_first_supervised_token_of_the_turn():
    batch = make_batch([Document(9, supervised=[0, 1, 1, 0, 1, 1, 1, 0, 1]), Document(4, supervised=[1, 1, 1, 1])])
    assert answer_positions(batch, torch.tensor([1, 2, 4, 5, 6, 9, 10])).tolist() == [0, 1, 0, 1, 2, 0, 1]


def test_buckets_of_positions_hold_every_block_once(monkeypatch: pytest.MonkeyPatch):
    """Only anchors 5 to 9 of a turn are right, and the buckets begin at 5 and 10."""
    batch = make_batch([Document(24, supervised=[0] * 3 + [1] * 21)])
    teacher = TinyHead().teacher_tokens(batch.verifier)

    def predict(anchors, carries):
        inside = (anchors.row_A >= 8) & (anchors.row_A < 13)
        return torch.where(inside[:, None], teacher[(anchors.row_A[:, None] + torch.arange(3)).clamp(max=23)], -5)

    predicting(monkeypatch, predict)
    drafter = tiny_drafter()
    tally = Tally(drafter.spec, bounds=(5, 10))
    with torch.no_grad():
        tally.add(batch, [True], *draft_row(drafter, TinyHead(), batch, CPU32, 4))
    found = report(tally, CPU)
    assert [(each["from"], each["to"], each["blocks"], each["steps"]) for each in found.by_position] == [
        (0, 4, 5, 5),
        (5, 9, 5, 2),
        (10, None, 10, 7),
    ]
    assert [each["tau_walk"] for each in found.by_position] == [1.0, 4.0, 1.0]
    assert sum(each["steps"] for each in found.by_position) == found.walk.steps


def test_intervals_come_from_documents_and_hold_the_number(monkeypatch: pytest.MonkeyPatch):
    right_in_the_first_document(monkeypatch)
    found = found_in(two_sources())
    assert found.certainty.tau_walk == (1.0, 4.0)  # of two documents a resample often takes one twice
    assert found.certainty_by_source["maths.jsonl"].tau_walk is None
    assert found.to_dict()["confidence"]["tau_walk"] == [1.0, 4.0]
    assert json.loads(json.dumps(found.to_dict()))["by_source"]["code.jsonl"]["confidence"] == {"tau_walk": None, "tau": None}


def test_packing_changes_no_interval(trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    folder, held_out = trained
    found = evaluate(folder, [held_out], CPU)
    again = evaluate(folder, [held_out], CPU.model_copy(update={"chunk_blocks": 2}))
    assert found.certainty == again.certainty
    assert found.to_dict() == again.to_dict()


def test_the_digest_is_that_of_the_documents_whatever_their_cache_and_order(trained: tuple[Path, Path], write_cache):
    folder, held_out = trained
    again, _, samples = write_cache(name="again", lengths=[12, 30, 3, 21], seed=9, next_token=7)
    one, same, fewer = (
        evaluate(folder, [cache], CPU, limit=limit).documents_digest for cache, limit in ((held_out, None), (again, None), (held_out, 3))
    )
    assert one == same == documents_digest([sample.key for sample in reversed(samples)])
    assert fewer == documents_digest([sample.key for sample in samples[:3]])
    assert one != fewer


def test_the_text_has_a_bar_for_every_slot(trained: tuple[Path, Path]):
    folder, held_out = trained
    text = evaluate(folder, [held_out], CPU.model_copy(update={"temperatures": (0.0, 1.0)})).to_text()
    assert text.count("T=1, draft") == 2
    assert "simulated serving" in text


@pytest.mark.parametrize(
    ("share", "width", "text"), [(0.0, 4, ""), (0.5, 4, "██"), (1.0, 4, "████"), (0.03125, 4, "▏"), (7.0, 2, "██"), (-1.0, 2, "")]
)
def test_bars_have_eighths_of_a_character(share: float, width: int, text: str):
    assert bar(share, width) == text


def test_a_plot_without_matplotlib_names_the_fix_before_anything_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dflash_cache.train.eval_plot.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["eval", "--cache", str(tmp_path), "--drafter", str(tmp_path), "--plot", str(tmp_path / "a.png")])
    assert result.exit_code == 2
    assert "matplotlib is not installed" in result.stderr
    assert "pip install 'dflash-cache[plot]'" in result.stderr


@pytest.mark.parametrize(("name", "problem"), [("a.txt", "is no picture's name"), ("no/a.png", "no such folder")])
def test_a_plot_that_cannot_be_written_is_refused_first(tmp_path: Path, name: str, problem: str):
    with pytest.raises(InputError, match=problem):
        check_plot(tmp_path / name)


def test_a_plot_is_drawn(trained: tuple[Path, Path], tmp_path: Path):
    pytest.importorskip("matplotlib")
    folder, held_out = trained
    plot(evaluate(folder, [held_out], CPU.model_copy(update={"temperatures": (1.0,)})), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_plots_bars_are_the_results_numbers(monkeypatch: pytest.MonkeyPatch):
    right_in_the_first_document(monkeypatch)
    names, taus, (below, above) = length_bars(found_in(two_sources()))
    assert names == ["all, greedy", "code.jsonl", "maths.jsonl", "position 0+"]
    assert taus[1:3] == [1.0, 4.0]
    assert (taus[0] - below[0], taus[0] + above[0]) == (1.0, 4.0)
    assert math.isnan(below[3])  # positions have no interval, and so no bar
    assert math.isnan(above[3])


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf, 1e-300])
def test_temperatures_by_which_logits_cannot_be_divided_are_refused(temperature: float):
    with pytest.raises(ValidationError):
        EvalConfig(temperatures=(temperature,))


def test_a_cache_that_is_named_twice_is_refused(trained: tuple[Path, Path]):
    folder, held_out = trained
    with pytest.raises(InputError, match="named twice"):
        evaluate(folder, [held_out, held_out.parent / "." / held_out.name], CPU)


def test_weights_that_are_not_finite_are_an_error_and_no_length_of_one(trained: tuple[Path, Path], tmp_path: Path):
    folder, held_out = trained
    export(folder, tmp_path / "drafter")
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    tensors["norm.weight"][0] = math.nan
    save_file(tensors, tmp_path / "drafter" / "model.safetensors")
    with pytest.raises(DflashError, match=r"(?s)not finite.*norm.weight"):
        evaluate(tmp_path / "drafter", [held_out], CPU)


def test_documents_that_were_trained_on_are_counted_and_warned_of(trained: tuple[Path, Path]):
    folder, _ = trained
    cache = folder.parent / "train"
    found = evaluate(folder, [cache], CPU, limit=4)
    assert found.documents_trained_on == 4
    assert "4 of the documents were trained on" in found.to_text()
    assert evaluate(folder / "checkpoints" / "step-00000003", [cache], CPU).documents_trained_on == 6


def test_documents_that_the_run_held_out_were_not_trained_on(write_cache, tmp_path: Path):
    cache, _, samples = write_cache(name="train")
    run(config(optim={"steps": 2}, data={"row_tokens": 64, "eval_fraction": 0.5}), [cache], tmp_path / "run")
    (reader,) = [CacheReader(cache)]
    held = held_out(reader, 0.5)
    assert 0 < held.sum() < len(samples)
    keys = [sample.key for sample in samples]
    assert documents_seen(tmp_path / "run", keys) == len(samples) - held.sum()
    assert documents_seen(tmp_path / "run", [key for key, is_held in zip(keys, held) if is_held]) == 0


def test_it_is_unknown_for_an_export_and_when_the_runs_cache_is_gone(trained: tuple[Path, Path], tmp_path: Path):
    folder, held_out_cache = trained
    assert documents_seen(held_out_cache, [b"k"]) is None
    assert documents_seen(folder, [b"k"]) == 0
    (folder.parent / "train").rename(tmp_path / "moved")
    assert documents_seen(folder, [b"k"]) is None
