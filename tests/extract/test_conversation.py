from __future__ import annotations

import pytest

from dflash_cache.extract.conversation import parse_conversation
from dflash_cache.extract.rejects import RowRejected

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def test_messages_are_kept_untouched():
    messages = [USER, {"role": "assistant", "content": "yo", "reasoning_content": "R", "tool_calls": [{"x": 1}]}]
    conversation = parse_conversation({"messages": messages, "tools": [{"name": "t"}]})
    assert conversation.messages is messages
    assert conversation.tools == [{"name": "t"}]
    assert conversation.assistant_turns == [1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "the row is no object but a list"),
        ({"text": "hi"}, "the row has no `messages`: its fields are text"),
        ({"messages": None}, "`messages` is no list but null"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": ["hi"]}, "message 0 is no object but a str"),
        ({"messages": [{"role": "system", "content": "s"}]}, "the conversation has no user turn"),
        ({"messages": [ASSISTANT, USER]}, "the conversation begins with an assistant turn"),
        ({"messages": [USER, {"role": "laguna", "content": "x"}]}, "message 1 has the unknown role 'laguna'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 0 has content that is not text"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 0 has content of another kind: a int"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "message 1 (assistant) is empty"),
        ({"messages": [USER], "tools": "t"}, "`tools` is no list but a str"),
    ],
)
def test_a_row_that_cannot_be_used_is_rejected_with_its_reason(row: object, reason: str):
    with pytest.raises(RowRejected) as rejected:
        parse_conversation(row)
    assert str(rejected.value).startswith(reason)


def test_the_prompt_is_everything_before_a_final_assistant_turn():
    later = {"role": "user", "content": "more"}
    assert parse_conversation({"messages": [USER, ASSISTANT]}).prompt() == [USER]
    assert parse_conversation({"messages": [USER, ASSISTANT, later]}).prompt() == [USER, ASSISTANT, later]
    assert parse_conversation({"messages": [USER, ASSISTANT, later, ASSISTANT]}).prompt() == [USER, ASSISTANT, later]


def test_there_is_no_prompt_without_a_turn_to_answer():
    with pytest.raises(RowRejected, match="no user turn to answer"):
        parse_conversation({"messages": [USER, {"role": "system", "content": "s"}, ASSISTANT]}).prompt()
