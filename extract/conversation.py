"""A checked conversation: messages as the chat template will see them, or in one sentence why there is none.

In: messages of a dataset row, tool descriptions, template arguments. Out: a Conversation. Knows no tokenizer and no dataset's
column names (`shapes` does). Texts, names, reasoning and ids are passed on as they are. Five things are put into the one form
that templates are written for, as the serving engines do before they render:

- a content of several text parts becomes one text, the parts joined by a new line; no content becomes an empty text
- a tool call's arguments given as JSON text become the object; none become an empty object
- a tool, or a call of one, given as a bare function is wrapped as {"type": "function", "function": ...}
- a field of a message that is null, or an empty `tool_calls`, is left out
- an assistant's `reasoning` is also given as `reasoning_content`, which most templates ask for
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .rejects import RowRejected

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields in which datasets keep what an assistant thought."""
NOT_FOR_ROWS = frozenset({"messages", "conversation", "tools", "documents", "chat_template", "tokenize", "padding", "truncation", "max_length"})
"""Arguments of a template's rendering that are not a row's to set, beside `return_...`, `add_...` and `continue_...`."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Checked messages."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """Tool descriptions for the chat template."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """More arguments for the chat template, such as enable_thinking."""
    pending: list[list[Message]] = field(default_factory=list)
    """Later turns of a prompt of several turns without answers: each is to be asked once the one before was answered."""

    @property
    def assistant_turns(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def prompt(self) -> list[Message]:
        """What the target is asked to answer: everything before a final assistant turn, else everything.

        Raises RowRejected when that does not end in something to answer.
        """
        messages = self.messages[:-1] if self.messages[-1]["role"] == "assistant" else self.messages
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise RowRejected("there is no user turn to answer")
        return messages


def parse_conversation(row: object) -> Conversation:
    """Check a row of the form {"messages": [{"role", "content", ...}, ...], "tools": [...]?}.

    Raises RowRejected with the reason.
    """
    if not isinstance(row, dict):
        raise RowRejected(f"the row is no object but {kind_of(row)}")
    if "messages" not in row:
        raise RowRejected(f"the row has no `messages`: its fields are {', '.join(map(str, row)) or 'none'}")
    return make_conversation(row["messages"], row.get("tools"), row.get("chat_template_kwargs"))


def make_conversation(
    messages: object,
    tools: object = None,
    template_args: object = None,
    *,
    roles: Mapping[str, str] | None = None,
    pending: Sequence[object] = (),
    column: str = "messages",
) -> Conversation:
    """Check messages, tools and template arguments; none of them is changed.

    `roles`: the role that stands for another one in the data. `pending`: see Conversation. `column`: where the messages came
    from, for the reasons. Lists and objects may also be given as JSON text. Raises RowRejected with the reason.
    """
    checked = _messages(messages, roles or {}, column)
    if not any(message["role"] == "user" for message in checked):
        raise RowRejected("the conversation has no user turn")
    later = [_messages(turn, roles or {}, column) for turn in pending]
    return Conversation(checked, _tools(tools), _template_args(template_args), later)


def from_json(value: object) -> object:
    """`value`, or the list or object that it spells as JSON; tables keep such things as text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def kind_of(value: object) -> str:
    """What a value is, for a reason."""
    return "null" if value is None else f"a {type(value).__name__}"


def _messages(messages: object, roles: Mapping[str, str], column: str) -> list[Message]:
    messages = from_json(messages)
    if not isinstance(messages, list):
        raise RowRejected(f"`{column}` is no list but {kind_of(messages)}")
    if not messages:
        raise RowRejected(f"`{column}` is empty")
    return [_message(number, from_json(message), roles) for number, message in enumerate(messages)]


def _message(number: int, message: object, roles: Mapping[str, str]) -> Message:
    if not isinstance(message, dict):
        raise RowRejected(f"message {number} is no object but {kind_of(message)}")
    given = message.get("role")
    role = roles.get(given, given) if isinstance(given, str) else given
    if role not in ROLES:
        raise RowRejected(f"message {number} has the unknown role {given!r}; known are {', '.join(ROLES)}")
    checked = {name: value for name, value in message.items() if value is not None}
    checked |= {"role": role, "content": _content(number, message.get("content"))}
    calls = from_json(checked.pop("tool_calls", None))
    if calls:
        checked["tool_calls"] = _tool_calls(number, calls)
    if role == "assistant" and "reasoning" in checked:
        checked.setdefault("reasoning_content", checked["reasoning"])
    says_something = any(checked.get(name) for name in ("content", "tool_calls", *REASONING))
    if not says_something and role in ("user", "assistant"):
        raise RowRejected(f"message {number} ({role}) is empty")
    return checked


def _content(number: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowRejected(f"message {number} has content of another kind: {kind_of(content)}")
    texts = []
    for part in content:
        text = part.get("text", part.get("value")) if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise RowRejected(f"message {number} has content that is not text")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(number: int, calls: object) -> list[Any]:
    if not isinstance(calls, list):
        raise RowRejected(f"message {number} has `tool_calls` that are no list but {kind_of(calls)}")
    return [_tool_call(number, from_json(call)) for call in calls]


def _tool_call(number: int, call: object) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise RowRejected(f"message {number} has a tool call that is no object but {kind_of(call)}")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(number, call["function"])}
    if isinstance(call.get("name"), str):
        function = {name: value for name, value in call.items() if name in ("name", "arguments")}
        others = {name: value for name, value in call.items() if name not in function}
        return {"type": "function", **others, "function": _with_arguments(number, function)}
    return call


def _with_arguments(number: int, function: dict[str, Any]) -> dict[str, Any]:
    arguments = from_json(function.get("arguments"))
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowRejected(f"message {number} calls a tool with arguments that are no JSON object")
    return {**function, "arguments": arguments}


def _tools(tools: object) -> list[dict[str, Any]] | None:
    tools = from_json(tools)
    if tools is None or tools == "":
        return None
    if not isinstance(tools, list):
        raise RowRejected(f"`tools` is no list but {kind_of(tools)}")
    described = [from_json(tool) for tool in tools]
    for number, tool in enumerate(described):
        if not isinstance(tool, dict):
            raise RowRejected(f"tool {number} is no object but {kind_of(tool)}")
    return [_wrapped(tool) for tool in described if isinstance(tool, dict)] or None


def _wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    bare = "function" not in tool and isinstance(tool.get("name"), str) and ("parameters" in tool or "description" in tool)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}} if bare else tool


def _template_args(arguments: object) -> dict[str, Any]:
    arguments = from_json(arguments)
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, dict):
        raise RowRejected(f"`chat_template_kwargs` is no object but {kind_of(arguments)}")
    taken = [name for name in arguments if name in NOT_FOR_ROWS or name.startswith(("return_", "add_", "continue_"))]
    if taken:
        raise RowRejected(f"`chat_template_kwargs` sets `{taken[0]}`, which is not a row's to set")
    return dict(arguments)
