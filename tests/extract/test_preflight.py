"""What is wrong is told before a row is read, and what is only doubtful does not stop the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_target as tiny
from fake_engine import FakeEngine

from dflash_cache.common.errors import DiskFull, InputError
from dflash_cache.extract import preflight as preflight_module
from dflash_cache.extract import run as run_module
from dflash_cache.extract.capture import gives_hidden_states, vllm_folder
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.devices import divide_devices, visible_devices
from dflash_cache.extract.preflight import check_folder, uses_latent_attention
from dflash_cache.extract.run import ExtractSummary, run

ROWS = [tiny.chat(f"question {number}", "answer " * (number + 1)) for number in range(6)]
STORED = 512 * 0.69
"""Bytes of a token: three layers and the verifier's, 64 wide, bfloat16."""


@pytest.fixture
def extract(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ExtractSummary]:
    monkeypatch.setattr(run_module, "start_engine", FakeEngine)

    def build(**fields: Any) -> ExtractSummary:
        data = tiny.write_jsonl(tmp_path / "data.jsonl", ROWS)
        given = {"model": str(tiny_llama), "data": (str(data),), "cache": tmp_path / "cache", "engine": "transformers", "max_length": 256}
        return run(ExtractConfig(**(given | fields)))

    return build


@pytest.fixture
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "prepare", lambda *_: pytest.fail("rows were read"))


def with_free(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(preflight_module.shutil, "disk_usage", lambda path: real(path)._replace(free=int(free)))


def tokens_of(extract: Callable[..., ExtractSummary], folder: Path) -> int:
    return extract(cache=folder / "first").tokens


def test_a_disk_without_space_for_what_there_is_to_store_is_refused(extract: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokens = tokens_of(extract, tmp_path)
    with_free(monkeypatch, tokens * STORED - 10)
    with pytest.raises(DiskFull, match="no space for even one part") as error:
        extract()
    assert error.value.exit_code == 1
    assert not list((tmp_path / "cache").glob("parts/*"))
    with_free(monkeypatch, tokens * STORED + 10)
    assert extract().samples == 6


def test_a_disk_with_space_for_a_part_but_not_for_all_is_warned_of(
    extract: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    tokens = tokens_of(extract, tmp_path)
    assert "Warning" not in capsys.readouterr().err
    with_free(monkeypatch, tokens * STORED - 10)
    assert extract(part_tokens=100).samples == 6
    assert "Warning: 0.00 GB are free" in capsys.readouterr().err


def test_what_is_stored_already_needs_no_space(extract: Any, monkeypatch: pytest.MonkeyPatch):
    extract()
    with_free(monkeypatch, 0)
    assert extract().already_stored == 6


def test_every_process_needs_space_for_a_part_of_its_own(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    spec = make.spec()  # 64 tokens a part, 4 x 8 values
    documents = SimpleNamespace(rows=lambda number, answer, longest: 100)
    one = 64 * 64 * 0.69
    with_free(monkeypatch, 2.5 * one)
    for workers, refused in ((1, False), (2, False), (3, True)):
        config: Any = SimpleNamespace(generate=False, max_length=256, max_new_tokens=9, workers=workers, cache=tmp_path)
        if refused:
            with pytest.raises(DiskFull):
                preflight_module.check_space(config, spec, documents, range(100))  # type: ignore[arg-type]
        else:
            preflight_module.check_space(config, spec, documents, range(100))  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_rows")
def test_a_template_that_refuses_a_question_and_an_answer_is_told_before_a_row_is_read(extract: Any, tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('I want a system prompt') }}")
    with pytest.raises(InputError, match="I want a system prompt"):
        extract(chat_template=template)
    template.write_text("{% if wanted %}{{ messages[0].content }}{% endif %}")
    with pytest.raises(InputError, match="gives no text"):
        extract(chat_template=template)
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("no_rows")
def test_a_cache_that_may_not_be_written_is_told_before_a_row_is_read(extract: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "locked").mkdir(mode=0o500)
    allowed = os.access  # root may write anywhere, so the system's answer is given here
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and allowed(path, mode))
    with pytest.raises(InputError, match="permission denied"):
        extract(cache=tmp_path / "locked/cache")


def test_a_cache_in_the_place_of_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file/cache"):
        with pytest.raises(InputError, match="it is no folder"):
            check_folder(path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="it is no folder"):
        check_folder(tmp_path / "nowhere")
    check_folder(tmp_path / "new/cache")


@pytest.mark.usefixtures("no_rows")
def test_latent_attention_is_refused_for_vllm_before_anything_is_loaded(extract: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight_module, "uses_latent_attention", lambda text: text.model_type == "llama")
    with pytest.raises(InputError, match="latent attention") as error:
        extract(engine="vllm")
    assert "--engine transformers" in error.value.fix
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    with pytest.raises(pytest.fail.Exception):
        extract(engine="vllm")


def test_latent_attention_is_known_by_its_config():
    from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

    assert uses_latent_attention(DeepseekV3Config())
    assert uses_latent_attention(SimpleNamespace(compress_ratios=[4, 128], head_dim=512))
    assert not uses_latent_attention(SimpleNamespace(kv_lora_rank=None))
    assert not uses_latent_attention(LlamaConfig())
    assert not uses_latent_attention(Qwen3Config())


def test_gpus_are_divided_in_whole_groups():
    assert divide_devices(["0", "1", "2", "3"], 2, 2) == ["0,1", "2,3"]
    assert divide_devices(["GPU-a", "GPU-b", "GPU-c"], 2, 1) == ["GPU-a", "GPU-b"]
    assert divide_devices([], 3, 1) == [None, None, None]
    assert divide_devices(["0", "1"], 1, 1) == [None]
    with pytest.raises(InputError, match="not enough GPUs") as error:
        divide_devices(["0", "1", "2"], 2, 2)
    assert error.value.fix == "use --workers 1"


def test_gpus_are_those_that_the_environment_leaves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_devices(2) == ["3", "5"]
    assert visible_devices(1) == []


@pytest.mark.usefixtures("no_rows")
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"workers": 3}, "not enough GPUs"),
        ({"engine": "vllm", "engine_args": {"tensor_parallel_size": "four"}}, "is no number of GPUs"),
        ({"engine": "vllm", "workers": 2, "engine_args": {"tensor_parallel_size": 2}}, "not enough GPUs"),
    ],
)
def test_processes_that_the_machine_cannot_have_are_refused(extract: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], problem: str):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(InputError, match=problem):
        extract(**fields)


def test_a_class_that_gives_no_hidden_states_is_refused_for_vllm_before_a_row_is_read(
    extract: Any, no_rows: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    write_vllm(tmp_path / "vllm", "class LlamaForCausalLM(nn.Module): pass")
    monkeypatch.setattr(preflight_module, "vllm_folder", lambda: tmp_path / "vllm")
    with pytest.raises(InputError, match=r"(?s)class whose hidden states .*LlamaForCausalLM") as error:
        extract(engine="vllm")
    assert error.value.exit_code == 2


VLLM_SOURCES = {
    "no base that has it": ("class LlamaForCausalLM(nn.Module, SupportsPP): pass", False),
    "a base that has it": ("class LlamaForCausalLM(nn.Module, SupportsPP, SupportsEagle3): pass", True),
    "a base of a base in another file": ("from .other import Parent\nclass LlamaForCausalLM(Parent): pass", True),
    "a base imported from the package itself": ("from vllm.model_executor.models.other import Parent as P\nclass LlamaForCausalLM(P): pass", True),
    "a base of another file that has it not": ("from .other import Orphan\nclass LlamaForCausalLM(Orphan): pass", False),
    "another name for a class": ("from .other import Parent as LlamaForCausalLM", True),
    "the attribute alone": ("class LlamaForCausalLM(nn.Module):\n    supports_eagle3 = True", True),
    "a base that is made by a call": ("class LlamaForCausalLM(make_base(), nn.Module): pass", None),
    "a base that is not there": ("from .missing import Parent\nclass LlamaForCausalLM(Parent): pass", None),
    "a class that is its own base": ("class LlamaForCausalLM(LlamaForCausalLM): pass", None),
    "no such class": ("", None),
}


@pytest.mark.parametrize("name", VLLM_SOURCES)
def test_the_interface_is_found_by_following_the_bases(tmp_path: Path, name: str):
    source, expected = VLLM_SOURCES[name]
    write_vllm(tmp_path / "vllm", source)
    assert gives_hidden_states("LlamaForCausalLM", tmp_path / "vllm") is expected
    assert gives_hidden_states("NobodyKnowsForCausalLM", tmp_path / "vllm") is None


def write_vllm(folder: Path, llama: str) -> None:
    """A package with a registry, interfaces and two files of models."""
    models = folder / "model_executor" / "models"
    models.mkdir(parents=True)
    head = "from torch import nn\nfrom .interfaces import SupportsEagle3, SupportsPP\n"
    (models / "registry.py").write_text('_TEXT = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}\n')
    (models / "interfaces.py").write_text(
        "from typing import Protocol\nclass SupportsPP(Protocol): pass\nclass SupportsEagle3(SupportsPP, Protocol): pass\n"
    )
    (models / "other.py").write_text(head + "class Parent(nn.Module, SupportsEagle3): pass\nclass Orphan(nn.Module): pass\n")
    (models / "llama.py").write_text(head + llama + "\n")


@pytest.mark.vllm
def test_the_answers_are_those_of_the_installed_vllm():
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    folder = vllm_folder()
    assert folder is not None
    for architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM", "StableLmForCausalLM", "Phi3ForCausalLM"):
        assert gives_hidden_states(architecture, folder) is supports_eagle3(ModelRegistry.models[architecture].load_model_cls()), architecture
