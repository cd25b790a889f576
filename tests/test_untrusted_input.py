"""What comes with a model, a cache or a checkpoint is data: no code of it runs, no link of it is followed, no number of it is believed."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_target as tiny
import torch
from click.testing import CliRunner
from numcodecs import zstd
from rows import tiny_drafter
from safetensors import SafetensorError

from dflash_cache.cli import main
from dflash_cache.common import target_folder
from dflash_cache.common.errors import CacheDamaged, DflashError, InputError
from dflash_cache.common.fingerprint import canonical, digest_bytes, digest_file
from dflash_cache.extract.target import read_target
from dflash_cache.extract.tokens import load_tokenizer
from dflash_cache.extract.writer import CacheWriter, clear_leftovers, open_cache
from dflash_cache.train import checkpoint
from dflash_cache.train.config import TrainConfig
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.repair import repair
from dflash_cache.train.verify import verify

ROOT = Path(__file__).parents[1]
PART = "parts/00000000-0000"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that is there once the code that must not run has run."""
    return tmp_path / "canary"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_manifest(part: Path, **changes: Any) -> None:
    """Change the manifest and seal it anew."""
    document = json.loads((part / "zarr.json").read_text())
    body = document["attributes"]["dflash"] | changes
    body.pop("digest")
    document["attributes"]["dflash"] = body | {"digest": digest_bytes(canonical(body))}
    (part / "zarr.json").write_bytes(canonical(document))


def replace_file(part: Path, name: str, data: bytes) -> None:
    """Put another file in the place of one of a part's, its size and digest in the manifest with it."""
    (part / name).write_bytes(data)
    files = json.loads((part / "zarr.json").read_text())["attributes"]["dflash"]["files"]
    size, digest = digest_file(part / name)
    edit_manifest(part, files=files | {name: {"size": size, "xxh3_128": digest}})


class Sprung:
    """Unpickled, it makes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return open, (str(self.canary), "w")


# --- code that comes with a model


def with_code(target: Path, tmp_path: Path, canary: Path, file: str, **changes: Any) -> Path:
    """The target with a module of its own that makes the canary, and `file` pointing at it."""
    folder = Path(shutil.copytree(target, tmp_path / "with_code"))
    edit(folder / file, **changes)
    (folder / "own_code.py").write_text(
        "from transformers import LlamaForCausalLM, PreTrainedTokenizerFast\n"
        f"open({str(canary)!r}, 'w').close()\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
        "class OwnModel(LlamaForCausalLM):\n    pass\n"
    )
    return folder


TOKENIZER = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_code.OwnTokenizer"]}}
MODEL = {"auto_map": {"AutoModelForCausalLM": "own_code.OwnModel"}}


def test_a_tokenizers_own_code_never_runs_unless_it_is_trusted(target, tmp_path, canary):
    folder = with_code(target, tmp_path, canary, "tokenizer_config.json", **TOKENIZER)
    data = tiny.write_jsonl(tmp_path / "data.jsonl", [tiny.chat("a", "b")])
    command = ["extract", "--model", str(folder), "--data", str(data), "--cache", str(tmp_path / "cache"), "--engine", "transformers"]
    for more in ([], ["--estimate"]):
        done = CliRunner().invoke(main, [*command, *more])
        assert not canary.exists()
        assert done.exit_code == 2, done.output
        assert "--trust-remote-code" in done.output
    load_tokenizer(folder, trust_remote_code=True)
    assert canary.exists()


def test_a_models_own_class_is_not_taken_where_transformers_has_one_unless_it_is_trusted(target, tmp_path, canary):
    folder = with_code(target, tmp_path, canary, "config.json", **MODEL)
    data = tiny.write_jsonl(tmp_path / "data.jsonl", [tiny.chat("a", "b")])
    command = ["extract", "--model", str(folder), "--data", str(data), "--cache", str(tmp_path / "cache"), "--engine", "transformers"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert not canary.exists()
    read_target(str(folder), trust_remote_code=True)
    assert canary.exists()


def test_code_beside_the_targets_files_in_a_cache_is_never_looked_at(write_cache, tmp_path, canary):
    """Training has no flag to trust with: nothing of a cache is code."""
    cache, _, _ = write_cache()
    shutil.copy(with_code_only(tmp_path, canary), cache / "target/own_code.py")
    edit(cache / "target/config.json", **(TOKENIZER | MODEL), model_type="own")
    target_folder.seal(cache / "target")
    verify(cache)
    done = CliRunner().invoke(main, ["train", "--cache", str(cache), "--out", str(tmp_path / "run"), "--dry-run", "--set", "model.mask_token_id=3"])
    assert done.exit_code == 0, done.output
    assert not canary.exists()


def with_code_only(tmp_path: Path, canary: Path) -> Path:
    (tmp_path / "code.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    return tmp_path / "code.py"


# --- pickles


def test_a_pickle_in_the_place_of_a_checkpoints_tensors_is_refused_unread(tmp_path, canary):
    drafter = tiny_drafter()
    state = checkpoint.CheckpointState(step=1, epoch=0, row=1, config=TrainConfig(), drafter=drafter.spec)
    folder = checkpoint.save(tmp_path / "run", state, drafter.state_dict(), {"exp_avg.x": torch.ones(3)}, keep=1)
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        torch.save(Sprung(canary), folder / name)
        with pytest.raises(DflashError, match="is not what was written"):
            checkpoint.load_tensors(folder, checkpoint.load_state(folder), name)
        size, digest = digest_file(folder / name)
        sealed = checkpoint.load_state(folder).model_copy(update={"files": {name: checkpoint.FileDigest(size=size, xxh3_128=digest)}})
        with pytest.raises((DflashError, SafetensorError)):
            checkpoint.load_tensors(folder, sealed, name)
    assert not canary.exists()
    torch.load(shutil.copy(folder / checkpoint.MODEL, tmp_path / "model.pt"), weights_only=False)
    assert canary.exists()  # it would have worked


def test_a_pickle_in_the_place_of_the_targets_head_is_refused_unread(write_cache, tmp_path, canary):
    cache, _, _ = write_cache()
    (cache / "target/head.safetensors").write_bytes(pickle.dumps(Sprung(canary)))
    target_folder.seal(cache / "target")
    assert any("head.safetensors" in problem.place for problem in verify(cache).problems)
    assert not canary.exists()


def test_nothing_that_runs_what_it_reads_is_imported_or_called():
    modules = {"pickle", "dill", "joblib", "cloudpickle", "marshal", "shelve"}
    calls = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load", "torch.jit.load", "os.system", "os.popen"}
    bad = []
    for path in [*(p for folder in ("common", "extract", "train") for p in (ROOT / folder).rglob("*.py")), ROOT / "cli.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
            )
            if modules & {str(name).split(".")[0] for name in names} or (isinstance(node, ast.Call) and ast.unparse(node.func) in calls):
                bad.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not bad


# --- links


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of somebody else's, with a file in it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/thesis.tex").write_text("mine")
    return tmp_path / "outside"


def untouched(outside: Path) -> bool:
    return [path.name for path in outside.iterdir()] == ["thesis.tex"] and (outside / "thesis.tex").read_text() == "mine"


def test_what_clears_up_after_a_kill_deletes_links_and_not_what_they_point_to(write_cache, outside):
    cache, spec, _ = write_cache()
    links = [cache / ".target.4242.0123abcd", cache / ".cache.json.4242.0123abcd", cache / "partial/00000009-0000", cache / "partial/odd"]
    for link in links:
        link.symlink_to(outside / "thesis.tex" if "json" in link.name else outside)
    CacheWriter(cache, spec).abandon()
    clear_leftovers(cache)
    assert not any(os.path.lexists(link) for link in links)
    assert untouched(outside)


def test_what_is_damaged_is_not_moved_out_of_the_cache_through_a_linked_quarantine(write_cache, outside):
    cache, _, _ = write_cache()
    (cache / "quarantine").symlink_to(outside)
    (cache / PART / "input_ids/c/0").write_bytes(b"")
    with pytest.raises(CacheDamaged, match="symbolic link") as caught:
        repair(cache)
    assert "quarantine" in caught.value.place
    assert (cache / PART).is_dir()
    assert untouched(outside)


def test_nothing_is_published_through_a_linked_folder_of_parts(write_cache, make, outside):
    cache, spec, _ = write_cache()
    shutil.rmtree(cache / "parts")
    (cache / "parts").symlink_to(outside)
    with pytest.raises(CacheDamaged, match="symbolic link"):
        CacheWriter(cache, spec)
    assert untouched(outside)


# --- numbers and sizes


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_metadata_with_a_number_that_is_not_finite_is_damage(write_cache, number):
    cache, _, _ = write_cache()
    text = (cache / "cache.json").read_text()
    assert text.count("1e-05") == 1
    (cache / "cache.json").write_text(text.replace("1e-05", number))
    with pytest.raises(CacheDamaged, match=r"cache\.json: is not valid JSON"):
        CacheReader(cache)
    (cache / "cache.json").write_text(text)
    seal = (cache / "target/files.json").read_text()
    (cache / "target/files.json").write_text(seal.replace('"size": ', f'"size": {number}, "was": ', 1))
    with pytest.raises(CacheDamaged, match=r"files\.json: is not valid JSON"):
        target_folder.check(cache)


def in_two_seconds_and_fifty_megabytes(do: Callable[[], Any]) -> Any:
    tracemalloc.start()
    started = time.monotonic()
    try:
        return do()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert time.monotonic() - started < 2
        assert peak < 50e6


@pytest.mark.parametrize("kind", ["endless", "nested", "list", "number"])
def test_a_list_of_rejects_that_is_none_is_reported_whatever_it_is(write_cache, kind):
    cache, _, _ = write_cache()
    path = cache / "rejects.jsonl"
    path.write_text({"endless": "", "nested": "[" * 100_000, "list": '["source", "row", "reason"]', "number": "5"}[kind])
    if kind == "endless":
        os.truncate(path, 1 << 40)
    found = in_two_seconds_and_fifty_megabytes(lambda: verify(cache, teacher=False).problems)
    assert [problem.entry for problem in found] == ["rejects.jsonl"]


@pytest.mark.parametrize("shape", [5, None, [10**12, 3, 8], [[64], 3, 8], {"0": 64}])
def test_an_arrays_metadata_that_claims_any_shape_is_named_by_verification_and_nothing_to_the_reader(write_cache, shape):
    cache, _, samples = write_cache()
    name = "hidden_states/exponent/zarr.json"
    document = json.loads((cache / PART / name).read_text()) | {"shape": shape}
    replace_file(cache / PART, name, json.dumps(document).encode())
    (problem,) = in_two_seconds_and_fifty_megabytes(lambda: verify(cache, teacher=False).problems)
    assert problem.place == str(cache / PART / name)
    assert (CacheReader(cache).read_sample(0).hidden_states == samples[0].hidden_states).all()


@pytest.mark.parametrize("content", [1 << 26, 1 << 33])
def test_a_chunk_that_would_grow_to_gigabytes_is_refused_before_it_grows(write_cache, monkeypatch, content):
    """A frame of a few bytes may claim any size; all that is sealed over it is right."""
    real = zstd.compress

    def bomb(data: Any, level: int) -> bytes:
        frame = bytearray(real(bytes(1 << 26), level))  # single segment or not, its size stands in four bytes
        at = frame.index((1 << 26).to_bytes(4, "little"))
        if content != 1 << 26:
            frame[4] |= 0xC0  # eight bytes instead
            frame[at : at + 4] = content.to_bytes(8, "little")
        return bytes(frame)

    monkeypatch.setattr("dflash_cache.extract.encoder.zstd.compress", bomb)
    cache, _, _ = write_cache(lengths=[20])
    with pytest.raises(CacheDamaged, match="another size"):
        in_two_seconds_and_fifty_megabytes(lambda: CacheReader(cache).read_sample(0))


def test_a_source_that_the_manifest_does_not_have_is_damage(write_cache):
    cache, _, _ = write_cache()
    edit_manifest(cache / PART, sources=[])
    with pytest.raises(CacheDamaged, match="out of range"):
        CacheReader(cache).read_sample(0)


def test_a_seal_with_a_name_that_no_file_can_have_is_damage(write_cache):
    cache, _, _ = write_cache()
    files = json.loads((cache / "target/files.json").read_text())["files"]
    for name in ("n" * 5000, "nul\0", "target/" * 900):
        more = files | {name: {"size": 1, "xxh3_128": "0" * 32}}
        (cache / "target/files.json").write_text(json.dumps({"files": more, "digest": digest_bytes(canonical(more))}))
        with pytest.raises(CacheDamaged):
            target_folder.check(cache)


@pytest.mark.parametrize("name", ["../outside/thesis.tex", "/etc/hostname", "parts/../../outside/thesis.tex"])
def test_a_manifest_that_names_a_file_outside_is_refused_by_all_that_read_it(write_cache, outside, name):
    cache, spec, _ = write_cache()
    files = json.loads((cache / PART / "zarr.json").read_text())["attributes"]["dflash"]["files"]
    edit_manifest(cache / PART, files=files | {name: {"size": 4, "xxh3_128": digest_bytes(b"mine")}})
    with pytest.raises(CacheDamaged, match="other files than a part has"):
        CacheReader(cache)
    for command in (["verify", str(cache)], ["inspect", str(cache)], ["train", "--cache", str(cache), "--out", str(outside / "run")]):
        assert CliRunner().invoke(main, command).exit_code == 1, command
    report = repair(cache)
    assert [moved.to for moved in report.moved] == ["quarantine/00000000-0000"]
    assert untouched(outside)
    with pytest.raises(InputError, match="not empty"):
        open_cache(outside, spec)
    assert untouched(outside)
