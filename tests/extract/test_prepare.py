"""Every row has one fate or, where each turn is a sample, one for each turn; nothing vanishes and nothing is counted twice."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny

from dflash_cache.common.errors import InputError
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.plan import make_plan
from dflash_cache.extract.prepare import Prepared, make_converter, prepare
from dflash_cache.extract.run import run
from dflash_cache.train.reader import CacheReader


@pytest.fixture
def settings(tiny_llama: Path, tmp_path: Path) -> Callable[..., ExtractConfig]:
    def build(*data: object, **fields: Any) -> ExtractConfig:
        given = {"model": str(tiny_llama), "data": tuple(map(str, data)), "cache": tmp_path / "cache", "engine": "transformers", "max_length": 256}
        return ExtractConfig(**(given | fields))

    return build


def prepared(config: ExtractConfig) -> Prepared:
    plan = make_plan(config)
    return prepare(config, plan.sources, plan.target, make_converter(config, plan.target, plan.tokenizer, plan.created_at))


def texts(found: Prepared) -> list[str]:
    return [tiny.build_tokenizer().decode(one.input_ids.tolist()) for one in take(found)]


def take(found: Prepared) -> list[Any]:
    return list(found.documents.take(range(len(found.documents))))


def test_rows_of_every_shape_in_one_file_are_counted_by_shape(settings, tmp_path):
    rows = [
        tiny.chat("a", "b"),
        {"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
        {"instruction": "e", "input": "", "output": "f"},
        {"question": "g", "answer": "h"},
        {"text": "some text"},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"nothing": "known"},
    ]
    data = tiny.write_jsonl(tmp_path / "d.jsonl", rows)
    found = prepared(settings(data))
    shapes = {shape: count for (_, shape), count in found.shapes.items()}
    assert shapes == {"messages": 1, "sharegpt": 1, "alpaca": 1, "prompt-response": 1, "text": 1, "tokens": 1}
    assert (found.rows, len(found.documents), len(found.rejects)) == (7, 6, 1)
    assert found.rejects[0].row == 6
    tokens = take(found)[5]
    assert (tokens.input_ids.tolist(), tokens.loss_mask.tolist()) == ([5, 6, 7], [0, 1, 1])


def test_each_turn_becomes_a_sample_and_the_account_says_how_many_more(settings, tmp_path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat("a", "b", "c", "d"), tiny.chat("e", "f"), tiny.chat("a", "b")])
    found = prepared(settings(data, turns="each"))
    assert (found.rows, found.more_turns, len(found.documents), [reject.reason for reject in found.rejects]) == (3, 1, 3, ["duplicate of row 0"])
    assert [int(one.loss_mask.sum()) for one in take(found)] == [2, 2, 2]  # an answer of one byte, and the end of the turn
    summary = run(settings(data, turns="each"))
    assert (summary.rows, summary.more_turns, summary.samples, summary.rejects) == (3, 1, 3, 1)
    assert "3 rows and 1 more turns = 3 samples + 1 rejects" in summary.to_text()


def test_supervised_spans_follow_the_setting_and_a_changed_setting_is_refused(settings, tmp_path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat("a", "bb", "c", "ddd")])
    wanted = {"assistant": 3 + 4, "last": 4}
    for supervise, count in wanted.items():
        (one,) = take(prepared(settings(data, supervise=supervise)))
        assert int(one.loss_mask.sum()) == count
    (one,) = take(prepared(settings(data, supervise="all")))
    assert one.loss_mask.all()
    run(settings(data))
    with pytest.raises(InputError, match=r"text.supervise: the cache has 'assistant', this run has 'last'"):
        run(settings(data, supervise="last"))
    with pytest.raises(InputError, match=r"text.template_args"):
        run(settings(data, template_args={"enable_thinking": False}))


def test_what_is_overlong_is_rejected_or_cut_and_the_least_counts_after_the_cut(settings, tmp_path):
    question, answer = "q" * 50, "12345"
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat(question, answer)])
    found = prepared(settings(data, max_length=40))
    assert found.rejects[0].reason.endswith("the limit is 40")
    found = prepared(settings(data, max_length=40, overlong="truncate"))
    assert (len(found.documents), found.rejects[0].reason) == (0, "no token is supervised in the first 40")
    (whole,) = take(prepared(settings(data)))
    first = int(np.flatnonzero(whole.loss_mask)[0])
    found = prepared(settings(data, max_length=first + 3, overlong="truncate"))
    assert (len(take(found)[0].input_ids), int(take(found)[0].loss_mask.sum())) == (first + 3, 3)
    assert found.notes["cut at the longest length"] == 1
    found = prepared(settings(data, max_length=first + 3, overlong="truncate", min_supervised=4))
    assert (len(found.documents), len(found.rejects)) == (0, 1)


def test_one_file_read_plain_compressed_and_in_part_gives_the_same_rows(settings, tmp_path, monkeypatch):
    rows = [tiny.chat(f"question {number}", f"answer {number}") for number in range(40)]
    plain = tiny.write_jsonl(tmp_path / "d.jsonl", rows)
    packed = tmp_path / "e.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert texts(prepared(settings(plain))) == texts(prepared(settings(packed)))
    assert texts(prepared(settings(f"{packed}:7"))) == texts(prepared(settings(plain)))[:7]
    monkeypatch.chdir(tmp_path)  # the choice follows from the source's name, which is the same in every run then
    half = prepared(settings("d.jsonl:50%"))
    assert 8 < half.rows < 32
    assert half.rows == len(half.documents)
    for number in range(40):
        assert (("d.jsonl", number) in half.passed) == any(one.source_row == number for one in take(half))


def test_a_cache_grows_from_a_share_to_the_whole(settings, tmp_path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat(f"question {number}", f"answer {number}") for number in range(30)])
    first = run(settings(f"{data}:40%"))
    second = run(settings(data))
    assert second.already_stored == first.samples
    assert second.samples == 30 - first.samples
    reader = CacheReader(tmp_path / "cache")
    assert {reader.source(number) for number in range(30)} == {str(data)}


def test_names_of_columns_and_roles_can_be_given(settings, tmp_path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [{"ask": "a", "say": "b"}])
    found = prepared(settings(data, columns={"prompt": "ask", "response": "say"}))
    assert "user\na<|im_end|>" in texts(found)[0]
    data = tiny.write_jsonl(tmp_path / "e.jsonl", [{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}])
    assert "bot" in prepared(settings(data)).rejects[0].reason
    assert len(prepared(settings(data, roles={"bot": "assistant"})).documents) == 1
    with pytest.raises(InputError, match="no such column"):
        make_plan(settings(data, columns={"promt": "ask"}))


def test_prompts_of_several_turns_are_one_document_or_a_sample_each_and_duplicates_are_found_turn_by_turn(settings, tmp_path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [{"turns": ["one", "two"]}, {"text": "no question"}, {"turns": ["one", "2"]}])
    found = prepared(settings(data, generate=True))
    assert (len(found.documents), [len(found.documents.keys(number)) for number in (0, 1)], found.more_turns) == (2, [1, 1], 0)
    assert [reject.reason for reject in found.rejects] == ["a row of shape text holds no question to answer"]
    each = prepared(settings(data, generate=True, turns="each"))
    assert ([len(each.documents.keys(number)) for number in (0, 1)], each.more_turns) == ([2, 1], 2)
    assert each.rejects[1].reason == "duplicate of row 0 (turn 1)"
    assert [each.documents.keys(number)[-1] for number in (0, 1)] == [found.documents.key(number) for number in (0, 1)]
    both = each.documents[0]
    assert [len(one.keys) for one in each.documents.take([0, 1], {both.key})] == [1, 1]
    assert both.script.rounds == ([{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}])


def test_settings_that_contradict_each_other_are_refused(settings, tmp_path):
    written = {"generate": True, "temperature": 1.0}
    for fields in (
        {"turns": "each", "supervise": "all"},
        {"turns": "each", "supervise": "last", **written},
        {"overlong": "truncate", **written},
        {"min_supervised": 2, **written},
        {"top_p": 0.9, "generate": True},
        {"top_k": 5},
    ):
        with pytest.raises(ValueError, match=next(iter(fields))):
            settings(tmp_path, **fields)
    assert settings(tmp_path, top_p=0.9, top_k=5, **written).top_k == 5


def test_a_template_of_ones_own_is_used_stored_and_part_of_the_settings(settings, tmp_path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat("hi", "yo")])
    template = tmp_path / "mine.jinja"
    template.write_text("{{ 'MINE ' }}" + tiny.CHATML)
    assert texts(prepared(settings(data, chat_template=template)))[0].startswith("MINE")
    run(settings(data, chat_template=template))
    assert (tmp_path / "cache/target/chat_template.jinja").read_text() == template.read_text()
    with pytest.raises(InputError, match="chat_template_hash"):
        run(settings(data))
    template.write_text("{% for %}")
    with pytest.raises(InputError, match="no valid Jinja"):
        make_plan(settings(data, chat_template=template))


def test_without_a_chat_template_only_conversations_are_refused(tmp_path, settings):
    target = tiny.build_target(tmp_path / "bare", template=None)
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [{"text": "plain"}, {"input_ids": [5, 6, 7]}])
    assert len(prepared(settings(data, model=str(target))).documents) == 2
    data = tiny.write_jsonl(tmp_path / "e.jsonl", [tiny.chat("hi", "yo")])
    with pytest.raises(InputError, match="no chat template"):
        prepared(settings(data, model=str(target)))


def test_tokens_outside_the_vocabulary_are_rejected(settings, tmp_path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [{"input_ids": [5, 320]}, {"input_ids": [5, 319]}])
    found = prepared(settings(data))
    assert [reject.reason for reject in found.rejects] == ["token 320 is not in the target's embedding of 320 rows"]
    assert len(found.documents) == 1


def test_reasons_and_shapes_are_in_the_json_summary(settings, tmp_path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat("a", "b"), tiny.chat("c", "d"), {"nothing": 1}])
    summary = json.loads(json.dumps(run(settings(data)).to_dict()))
    assert summary["shapes"] == {str(data): {"messages": 2}}
    assert list(summary["reject_reasons"].values()) == [1]


@pytest.mark.parametrize(
    ("fields", "problem"), [({"chunk_tokens": 1 << 21}, "less than or equal to 1048576"), ({"chunk_tokens": 1 << 20, "model": "wide"}, "would have")]
)
def test_settings_that_no_cache_may_have_are_the_users_error(settings, tmp_path, fields, problem):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat("hi", "yo")])
    if "model" in fields:
        fields = fields | {
            "model": str(tiny.build_target(tmp_path / "wide", hidden_size=2048, num_hidden_layers=2, intermediate_size=8)),
            "layers": (0,),
        }
    with pytest.raises(InputError, match=problem):
        make_plan(settings(data, **fields))
