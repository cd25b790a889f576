from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_cache.common.errors import InputError
from dflash_cache.extract.conversation import Conversation
from dflash_cache.extract.rejects import RowRejected
from dflash_cache.extract.shapes import KEYS, PlainText, TokenRow, check_reading, parse_row

USER, ASSISTANT, SYSTEM = ({"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yo"), ("system", "s")))
LATER = {"role": "user", "content": "more"}


def conversation(row: dict[str, Any], shape: str, **options: Any) -> Conversation:
    parsed = parse_row(row, **options)
    assert parsed.shape == shape
    assert isinstance(parsed.value, Conversation)
    return parsed.value


@pytest.mark.parametrize(
    ("row", "shape", "messages"),
    [
        # messages
        ({"messages": [SYSTEM, USER, ASSISTANT]}, "messages", [SYSTEM, USER, ASSISTANT]),
        ({"messages": [USER, ASSISTANT], "system": "s"}, "messages", [SYSTEM, USER, ASSISTANT]),
        ({"messages": [SYSTEM, USER], "system": "other"}, "messages", [SYSTEM, USER]),
        ({"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, "messages", [USER, ASSISTANT]),
        # sharegpt
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, "sharegpt", [USER, ASSISTANT]),
        ({"conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yo"}]}, "sharegpt", [USER, ASSISTANT]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "chatgpt", "value": "yo"}]}, "sharegpt", [USER, ASSISTANT]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "bing", "value": "yo"}]}, "sharegpt", [USER, ASSISTANT]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "bard", "value": "yo"}]}, "sharegpt", [USER, ASSISTANT]),
        ({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"}]}, "sharegpt", [SYSTEM, USER]),
        ({"conversations": [USER, ASSISTANT]}, "sharegpt", [USER, ASSISTANT]),
        ({"conversations": [{"role": "human", "content": "hi"}, {"role": "gpt", "content": "yo"}]}, "sharegpt", [USER, ASSISTANT]),
        ({"conversation": [USER, ASSISTANT], "system": "s"}, "sharegpt", [SYSTEM, USER, ASSISTANT]),
        # alpaca
        ({"instruction": "hi", "input": "", "output": "yo"}, "alpaca", [USER, ASSISTANT]),
        ({"instruction": "h", "input": "i", "output": "yo"}, "alpaca", [{"role": "user", "content": "h\n\ni"}, ASSISTANT]),
        ({"instruction": "h", "context": "i", "response": "yo"}, "alpaca", [{"role": "user", "content": "h\n\ni"}, ASSISTANT]),
        ({"instruction": "hi"}, "alpaca", [USER]),
        ({"instruction": "hi", "output": ""}, "alpaca", [USER]),
        (
            {"instruction": "more", "output": "yo", "system": "s", "history": [["hi", "yo"]]},
            "alpaca",
            [SYSTEM, USER, ASSISTANT, LATER, ASSISTANT],
        ),
        # prompt-response
        ({"prompt": "hi"}, "prompt-response", [USER]),
        ({"question": "hi", "answer": "yo"}, "prompt-response", [USER, ASSISTANT]),
        ({"problem": "hi", "solution": "yo", "answer": "7"}, "prompt-response", [USER, ASSISTANT]),
        ({"prompt": "hi", "canonical_solution": "yo", "test": "t"}, "prompt-response", [USER, ASSISTANT]),
        ({"query": "hi", "response": "yo"}, "prompt-response", [USER, ASSISTANT]),
        ({"prompt": "hi", "completion": "yo"}, "prompt-response", [USER, ASSISTANT]),
        ({"prompt": "hi", "chosen": "yo", "rejected": "no"}, "prompt-response", [USER, ASSISTANT]),
        ({"prompt": "hi", "chosen": [USER, ASSISTANT], "rejected": [USER]}, "prompt-response", [USER, ASSISTANT]),
        ({"prompt": "hi", "answer": None}, "prompt-response", [USER]),
        ({"prompt": "hi", "answer": float("nan")}, "prompt-response", [USER]),
        ({"prompt": "hi", "answer": 204}, "prompt-response", [USER, {"role": "assistant", "content": "204"}]),
        ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, "prompt-response", [SYSTEM, USER, ASSISTANT]),
        ({"prompt": [USER], "response": "yo"}, "prompt-response", [USER, ASSISTANT]),
        ({"prompt": [USER], "chosen": {"from": "gpt", "value": "yo"}}, "prompt-response", [USER, ASSISTANT]),
        ({"instruction": "hi", "question": "more", "answer": "yo"}, "prompt-response", [LATER, ASSISTANT]),
        ({"system_prompt": "s", "question": "hi", "response": "yo"}, "prompt-response", [SYSTEM, USER, ASSISTANT]),
        (
            {"prompt": '["hi"]', "response": '{"a": 1}'},
            "prompt-response",
            [{"role": "user", "content": '["hi"]'}, {"role": "assistant", "content": '{"a": 1}'}],
        ),
        ({"prompt": json.dumps([USER]), "response": json.dumps([ASSISTANT])}, "prompt-response", [USER, ASSISTANT]),
    ],
)
def test_each_shape_is_found_and_gives_these_messages(row: dict[str, Any], shape: str, messages: list[dict[str, Any]]):
    found = conversation(row, shape)
    assert found.messages == messages
    assert found.pending == []


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"messages": [USER], "conversations": [LATER], "prompt": "p", "text": "t", "input_ids": [1]}, "messages"),
        ({"messages": None, "conversations": [USER], "instruction": "i", "text": "t"}, "sharegpt"),
        ({"instruction": "hi", "input_ids": [1], "text": "t"}, "alpaca"),
        ({"prompt": "hi", "instruction": "i", "input_ids": [1], "text": "t"}, "prompt-response"),
        ({"input_ids": [1], "text": "t"}, "tokens"),
        ({"text": "t", "url": "u"}, "text"),
    ],
)
def test_a_row_of_several_shapes_is_the_first_in_the_documented_order(row: dict[str, Any], shape: str):
    assert parse_row(row).shape == shape


def test_a_forced_shape_is_taken_where_another_would_be_found():
    row = {"messages": [USER], "prompt": "more", "text": "t", "input_ids": [1]}
    assert conversation(row, "prompt-response", data_format="prompt-response").messages == [LATER]
    assert parse_row(row, "text").value == PlainText("t")
    assert parse_row(row, "tokens").shape == "tokens"
    with pytest.raises(RowRejected, match="the row has no `conversations`: its columns are messages, prompt, text, input_ids"):
        parse_row(row, "sharegpt")


def test_a_column_that_the_user_names_is_read_and_decides_the_shape():
    row = {"conversation": [USER, ASSISTANT], "question": "more", "answer": "yo", "messages": [SYSTEM, USER], "text": "x"}
    assert conversation(row, "messages", columns={"messages": "conversation"}).messages == [USER, ASSISTANT]
    assert conversation(row, "prompt-response", columns={"prompt": "question", "response": "answer"}).messages == [LATER, ASSISTANT]
    assert conversation(row, "prompt-response", columns={"prompt": "text", "response": "question"}).messages[1]["content"] == "more"
    assert conversation(row | {"fns": [{"name": "f", "parameters": {}}]}, "messages", columns={"tools": "fns"}).tools is not None
    taken = {"response": "hi", "answer": "yo"}  # what is the prompt now is not the response as well
    assert conversation(taken, "prompt-response", columns={"prompt": "response"}).messages == [USER, ASSISTANT]
    with pytest.raises(RowRejected, match="the row has no `chat`"):
        parse_row(row, columns={"messages": "chat"})


def test_turns_without_answers_are_a_prompt_and_the_turns_to_ask_later():
    found = conversation({"question_id": 81, "turns": ["hi", "more", "end"]}, "prompt-response")
    assert found.messages == found.prompt() == [USER]
    assert found.pending == [[LATER], [{"role": "user", "content": "end"}]]
    nested = conversation({"question": [[SYSTEM, USER], [LATER]], "function": []}, "prompt-response")
    assert (nested.messages, nested.pending) == ([SYSTEM, USER], [[LATER]])


def test_a_call_and_an_observation_of_sharegpt_are_tool_turns():
    calls = [{"name": "f", "arguments": {"a": None}}, {"name": "g", "arguments": "{}"}]
    row = {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": json.dumps(calls[0])},
            {"from": "observation", "value": '{"b": 2}'},
            {"from": "function_call", "value": json.dumps(calls)},
            {"from": "tool", "value": "t"},
            {"from": "gpt", "value": "yo"},
        ],
        "tools": '[{"name": "f", "description": "d", "parameters": {}}]',
    }
    found = conversation(row, "sharegpt")
    wrapped = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in (("f", {"a": None}), ("g", {}))]
    assert found.messages == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": wrapped[:1]},
        {"role": "tool", "content": '{"b": 2}'},
        {"role": "assistant", "content": "", "tool_calls": wrapped},
        {"role": "tool", "content": "t"},
        ASSISTANT,
    ]
    assert found.tools == [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


def test_a_call_that_was_given_a_role_is_what_that_role_said():
    row = {"conversations": [USER, {"from": "function_call", "value": "f(1)"}]}
    found = parse_row(row, roles={"function_call": "assistant"}).value
    assert isinstance(found, Conversation)
    assert found.messages == [USER, {"role": "assistant", "content": "f(1)"}]


def test_a_role_that_is_not_known_is_rejected_by_number_unless_it_was_given_a_meaning():
    for row in ({"messages": [USER, {"role": "laguna", "content": "yo"}]}, {"conversations": [USER, {"from": "laguna", "value": "yo"}]}):
        with pytest.raises(RowRejected, match="message 1 has the unknown role 'laguna'"):
            parse_row(row)
        found = parse_row(row, roles={"laguna": "assistant"}).value
        assert isinstance(found, Conversation)
        assert found.messages == [USER, ASSISTANT]
    with pytest.raises(RowRejected, match="message 1 has the unknown role 'gpt'"):
        parse_row({"messages": [USER, {"role": "gpt", "content": "yo"}]})
    found = parse_row(
        {"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "yo"}]}, roles={"gpt": "user", "human": "assistant"}
    ).value
    assert isinstance(found, Conversation)
    assert found.messages == [USER, ASSISTANT]


def test_a_developer_is_never_an_assistant():
    found = conversation({"messages": [{"role": "developer", "content": "d"}, USER]}, "messages")
    assert (found.messages[0]["role"], found.assistant_turns) == ("developer", [])
    for name in ("developer", "system", "user", "tool"):
        with pytest.raises(InputError, match=f"would teach the drafter what the {name} wrote"):
            check_reading(None, {}, {name: "assistant"})
    check_reading(None, {}, {"laguna": "assistant", "assistant": "assistant"})


def test_template_arguments_and_tools_are_read_beside_every_shape_of_chat():
    more = {"chat_template_kwargs": {"enable_thinking": False}, "tools": [{"name": "f", "parameters": {}}]}
    for row in ({"messages": [USER]}, {"conversations": [USER]}, {"instruction": "hi"}, {"prompt": "hi"}):
        found = parse_row(row | more).value
        assert isinstance(found, Conversation)
        assert found.messages == [USER]
        assert found.template_args == {"enable_thinking": False}
        assert found.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_text_is_kept_as_it_is():
    assert parse_row({"text": " a\n "}).value == PlainText(" a\n ")


@pytest.mark.parametrize(
    ("more", "mask"),
    [
        ({}, None),
        ({"loss_mask": [0, 1, 1]}, [0, 1, 1]),
        ({"loss_mask": [False, True, 1.0]}, [0, 1, 1]),
        ({"assistant_masks": [0, 0, 1]}, [0, 0, 1]),
        ({"labels": [-100, 6, 7]}, [0, 1, 1]),
        ({"loss_mask": [1, 0, 0], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]}, [1, 0, 0]),
        ({"loss_mask": "[0, 1, 1]"}, [0, 1, 1]),
    ],
)
def test_tokens_are_read_with_the_mask_that_they_bring(more: dict[str, Any], mask: list[int] | None):
    parsed = parse_row({"input_ids": [5, 6, 7]} | more)
    assert parsed.shape == "tokens"
    assert isinstance(parsed.value, TokenRow)
    assert (parsed.value.input_ids.tolist(), str(parsed.value.input_ids.dtype)) == ([5, 6, 7], "int32")
    if mask is None:
        assert parsed.value.loss_mask is None
    else:
        assert parsed.value.loss_mask is not None
        assert (parsed.value.loss_mask.tolist(), str(parsed.value.loss_mask.dtype)) == (mask, "uint8")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([USER], "the row is no object but a list"),
        (None, "the row is no object but null"),
        ({}, "the row has no shape that is known: its columns are none"),
        ({"url": "u", "id": 1}, "the row has no shape that is known: its columns are url, id"),
        ({"messages": None}, "`messages` is null"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": [SYSTEM]}, "the conversation has no user turn"),
        ({"conversations": []}, "`conversations` is empty"),
        ({"conversations": "x"}, "`conversations` is no list but a str"),
        ({"conversations": [{"from": "gpt", "value": "yo"}]}, "the conversation has no user turn"),
        ({"conversations": [{"from": "human", "value": 7}]}, "message 0 has content of another kind: a int"),
        ({"conversations": [USER, {"from": "function_call", "value": "f(1)"}]}, "message 1 (function_call) is no JSON of a tool call"),
        ({"messages": [USER], "images": ["1.jpg"]}, "the row has `images`, which is no text"),
        ({"instruction": ""}, "message 0 (user) is empty"),
        ({"instruction": 7.5, "history": [["hi"]]}, "`history` is no list of pairs"),
        ({"instruction": "hi", "history": 7}, "`history` is no list of pairs"),
        ({"instruction": "hi", "output": ["yo"]}, "`output` is no text but a list"),
        ({"prompt": ""}, "message 0 (user) is empty"),
        ({"prompt": True}, "`prompt` is no list but a bool"),
        ({"prompt": [], "response": "x"}, "the conversation has no user turn"),
        ({"prompt": {"text": "hi"}}, "message 0 has the unknown role None"),
        ({"prompt": "hi", "answer": ["a", "b"]}, "message 1 is no object but a str"),
        ({"turns": []}, "`turns` is empty"),
        ({"turns": [3]}, "`turns` is no list but a int"),
        ({"prompt": "hi", "system": ["s"]}, "`system` is no text but a list"),
        ({"text": ""}, "`text` is empty"),
        ({"text": ["t"]}, "`text` is no text but a list"),
        ({"input_ids": []}, "`input_ids` is empty"),
        ({"input_ids": "x"}, "`input_ids` is no list but a str"),
        ({"input_ids": [1, 2.0]}, "`input_ids` has a float at 1 where a whole number belongs"),
        ({"input_ids": [1, True]}, "`input_ids` has a bool at 1 where a whole number belongs"),
        ({"input_ids": [[1, 2]]}, "`input_ids` has a list at 0 where a whole number belongs"),
        ({"input_ids": [1, -2]}, "`input_ids` has -2 at 1, which is no token id"),
        ({"input_ids": [2**31]}, "`input_ids` has 2147483648 at 0, which is no token id"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "`loss_mask` has 1 entries for 2 tokens"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "`loss_mask` has 2 at 1 where 0 or 1 belongs"),
        ({"input_ids": [1, 2], "loss_mask": [1, 0.5]}, "`loss_mask` has a float at 1 where a whole number belongs"),
        ({"input_ids": [1, 2], "assistant_masks": [0, -1]}, "`assistant_masks` has -1 at 1 where 0 or 1 belongs"),
        ({"input_ids": [1, 2], "labels": [-100]}, "`labels` has 1 entries for 2 tokens"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "`labels` has 2 at 0 where the token is 1; it must be that token, unshifted, or -100"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "`attention_mask` hides some tokens"),
    ],
)
def test_a_row_that_cannot_be_used_is_rejected_with_its_reason(row: object, reason: str):
    with pytest.raises(RowRejected) as rejected:
        parse_row(row)
    assert str(rejected.value).startswith(reason)


def test_rows_without_a_usable_conversation_are_rejected_one_by_one_and_the_others_are_read():
    rows: list[object] = [{"messages": [USER, ASSISTANT]}, [], {"messages": [SYSTEM]}, {"messages": [ASSISTANT, USER]}, {"messages": None}]
    outcomes = []
    for row in rows:
        try:
            outcomes.append(parse_row(row).shape)
        except RowRejected as rejected:
            outcomes.append(str(rejected))
    assert outcomes == ["messages", "the row is no object but a list", "the conversation has no user turn", "messages", "`messages` is null"]


@pytest.mark.parametrize(
    ("data_format", "columns", "roles", "problem"),
    [
        ("chat", {}, {}, "no such shape of rows"),
        (None, {"message": "m"}, {}, "no such column"),
        (None, {"messages": "m", "prompt": "p"}, {}, "columns of several shapes"),
        ("text", {"messages": "m"}, {}, "columns of several shapes"),
        (None, {}, {"laguna": "bot"}, "no such role"),
    ],
)
def test_what_no_row_could_be_read_by_is_refused(data_format: str | None, columns: dict[str, str], roles: dict[str, str], problem: str):
    with pytest.raises(InputError, match=problem):
        check_reading(data_format, columns, roles)


def test_every_shape_can_be_forced_and_have_its_columns_named():
    for shape, names in KEYS.items():
        check_reading(shape, dict.fromkeys(names, "column"), {})
        check_reading(shape, {"tools": "t", "system": "s"}, {})
