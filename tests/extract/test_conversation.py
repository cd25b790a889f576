from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from dflash_cache.extract.conversation import make_conversation, parse_conversation
from dflash_cache.extract.rejects import RowRejected

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "default": None}}}


def call(arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]}


def test_tool_turns_and_all_other_fields_of_messages_are_kept_and_nothing_is_changed_in_the_row():
    messages = [
        {"role": "system", "content": " s\n"},
        {"role": "user", "content": " hi ", "name": "x"},
        call({"a": 1, "b": None}) | {"reasoning_content": "R", "content": "C "},
        {"role": "tool", "content": "{}", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "yo", "reasoning": "R", "thinking": "T", "weight": 0},
    ]
    row = {"messages": messages, "tools": [TOOL]}
    before = copy.deepcopy(row)
    conversation = parse_conversation(row)
    assert conversation.messages == [*messages[:4], messages[4] | {"reasoning_content": "R"}]
    assert conversation.tools == [TOOL]
    assert conversation.assistant_turns == [2, 4]
    assert row == before
    conversation.messages[2]["tool_calls"][0]["function"]["name"] = "g"
    assert row == before


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "tool_calls"])
def test_an_answer_without_content_says_something_by_its_reasoning_or_its_calls(name: str):
    said = {"role": "assistant", name: "R" if name != "tool_calls" else call({})["tool_calls"]}
    also = {"reasoning_content": "R"} if name == "reasoning" else {}
    assert parse_conversation({"messages": [USER, said]}).messages[1] == {"content": ""} | said | also
    with pytest.raises(RowRejected, match="message 1 \\(assistant\\) is empty"):
        parse_conversation({"messages": [USER, {"role": "assistant", name: None}]})


def test_a_null_field_an_absent_one_and_an_empty_list_of_calls_are_the_same():
    forms = [
        ASSISTANT,
        ASSISTANT | {"tool_calls": None, "name": None},
        ASSISTANT | {"tool_calls": []},
    ]
    assert [parse_conversation({"messages": [USER, form]}).messages for form in forms] == [[USER, ASSISTANT]] * 3
    asked = call({})
    without = {name: value for name, value in asked.items() if name != "content"}
    assert parse_conversation({"messages": [USER, asked | {"content": None}]}) == parse_conversation({"messages": [USER, without]})


@pytest.mark.parametrize("arguments", ['{"a": {"b": null}, "c": "ä"}', ' {"a":{"b":null},"c":"\\u00e4"}\n', {"a": {"b": None}, "c": "ä"}])
def test_arguments_as_json_text_and_as_an_object_are_the_same_and_keep_their_nulls(arguments: object):
    (_, message) = parse_conversation({"messages": [USER, call(arguments)]}).messages
    assert message == call({"a": {"b": None}, "c": "ä"})


@pytest.mark.parametrize("arguments", [None, "", "null", "{}", {}])
def test_no_arguments_are_an_empty_object(arguments: object):
    assert parse_conversation({"messages": [USER, call(arguments)]}).messages[1] == call({})


@pytest.mark.parametrize("arguments", ["[]", "7", '"{}"', '{"a": ', "a=1", [1], 7])
def test_arguments_that_are_no_object_are_a_reject(arguments: object):
    with pytest.raises(RowRejected, match="message 1 calls a tool with arguments that are no JSON object"):
        parse_conversation({"messages": [USER, call(arguments)]})


def test_bare_functions_and_bare_calls_are_wrapped():
    bare = {"name": "f", "description": "d", "parameters": {"type": "object", "default": None}}
    bare_call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "f", "arguments": '{"a": 1}'}]}
    for tools in ([bare], [TOOL], json.dumps([bare]), [json.dumps(bare)], [bare | {"type": "function"}]):
        conversation = make_conversation([USER, bare_call], tools)
        assert conversation.tools == [TOOL]
        assert conversation.messages[1] == call({"a": 1})


@pytest.mark.parametrize("tools", [None, [], "[]", ""])
def test_no_tools_are_none(tools: object):
    assert make_conversation([USER], tools).tools is None


def test_a_content_in_parts_is_their_texts_on_lines_of_their_own():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "value": " b"}]
    assert make_conversation([{"role": "user", "content": parts}]).messages == [{"role": "user", "content": "a \n b"}]


def test_messages_that_a_table_keeps_as_json_are_read_and_contents_that_are_json_are_not():
    said = {"role": "user", "content": '{"a": [1]}'}
    assert [make_conversation(form).messages for form in ([said], json.dumps([said]), [json.dumps(said)])] == [[said]] * 3


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "the row is no object but a list"),
        ({"text": "hi"}, "the row has no `messages`: its fields are text"),
        ({"messages": None}, "`messages` is no list but null"),
        ({"messages": "[{"}, "`messages` is no list but a str"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": ["hi"]}, "message 0 is no object but a str"),
        ({"messages": [{"role": "system", "content": "s"}]}, "the conversation has no user turn"),
        ({"messages": [{"role": "developer", "content": "s"}, ASSISTANT]}, "the conversation has no user turn"),
        ({"messages": [USER, {"role": "laguna", "content": "x"}]}, "message 1 has the unknown role 'laguna'; known are system, developer,"),
        ({"messages": [{"content": "x"}]}, "message 0 has the unknown role None"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "message 0 has the unknown role ['user']"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 0 has content that is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "message 0 has content that is not text"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 0 has content of another kind: a int"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "message 1 (assistant) is empty"),
        ({"messages": [{"role": "user", "content": None}]}, "message 0 (user) is empty"),
        ({"messages": [USER, ASSISTANT | {"tool_calls": "x"}]}, "message 1 has `tool_calls` that are no list but a str"),
        ({"messages": [USER, ASSISTANT | {"tool_calls": [3]}]}, "message 1 has a tool call that is no object but a int"),
        ({"messages": [USER], "tools": "t"}, "`tools` is no list but a str"),
        ({"messages": [USER], "tools": ["t"]}, "tool 0 is no object but a str"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "`chat_template_kwargs` is no object but a list"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "`chat_template_kwargs` sets `tokenize`"),
        ({"messages": [USER], "chat_template_kwargs": {"add_generation_prompt": True}}, "`chat_template_kwargs` sets `add_generation_prompt`"),
    ],
)
def test_a_row_that_cannot_be_used_is_rejected_with_its_reason(row: object, reason: str):
    with pytest.raises(RowRejected) as rejected:
        parse_conversation(row)
    assert str(rejected.value).startswith(reason)


def test_an_assistant_may_begin_because_templates_judge_that():
    assert parse_conversation({"messages": [ASSISTANT, USER]}).messages == [ASSISTANT, USER]


def test_a_role_of_the_data_stands_for_the_one_it_was_given():
    messages = [{"role": "asker", "content": "hi"}, {"role": "laguna", "content": "yo"}, {"role": "developer", "content": "d"}]
    conversation = make_conversation(messages, roles={"laguna": "assistant", "asker": "user"})
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "developer"]
    assert conversation.assistant_turns == [1]


@pytest.mark.parametrize("given", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_template_arguments_of_a_row_are_kept(given: object):
    assert parse_conversation({"messages": [USER], "chat_template_kwargs": given}).template_args == {"enable_thinking": False}
    assert parse_conversation({"messages": [USER], "chat_template_kwargs": None}).template_args == {}


def test_the_prompt_is_everything_before_a_final_assistant_turn():
    later = {"role": "user", "content": "more"}
    assert parse_conversation({"messages": [USER, ASSISTANT]}).prompt() == [USER]
    assert parse_conversation({"messages": [USER, ASSISTANT, later]}).prompt() == [USER, ASSISTANT, later]
    assert parse_conversation({"messages": [USER, ASSISTANT, later, ASSISTANT]}).prompt() == [USER, ASSISTANT, later]


def test_there_is_no_prompt_without_a_turn_to_answer():
    with pytest.raises(RowRejected, match="no user turn to answer"):
        parse_conversation({"messages": [USER, {"role": "system", "content": "s"}, ASSISTANT]}).prompt()


def test_an_assistants_reasoning_is_found_by_templates_under_either_name():
    message = {"role": "assistant", "content": "C", "reasoning": "R"}
    (_, answer) = parse_conversation({"messages": [USER, message]}).messages
    assert (answer["reasoning"], answer["reasoning_content"]) == ("R", "R")
    (_, answer) = parse_conversation({"messages": [USER, message | {"reasoning_content": "own"}]}).messages
    assert answer["reasoning_content"] == "own"
    assert message == {"role": "assistant", "content": "C", "reasoning": "R"}
