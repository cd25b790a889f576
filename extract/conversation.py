"""One row as a conversation: checks the messages, says in one sentence why a row cannot be used.

In: a dataset row. Out: a Conversation whose messages are passed to the chat template untouched. Knows no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .rejects import RowRejected

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """Checked messages, as the dataset gave them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """Tool descriptions for the chat template."""

    @property
    def assistant_turns(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def prompt(self) -> list[dict[str, Any]]:
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
        raise RowRejected(f"the row is no object but {_kind(row)}")
    if "messages" not in row:
        raise RowRejected(f"the row has no `messages`: its fields are {', '.join(map(str, row)) or 'none'}")
    messages = row["messages"]
    if not isinstance(messages, list):
        raise RowRejected(f"`messages` is no list but {_kind(messages)}")
    if not messages:
        raise RowRejected("`messages` is empty")
    for number, message in enumerate(messages):
        _check_message(number, message)
    if messages[0]["role"] == "assistant":
        raise RowRejected("the conversation begins with an assistant turn")
    if not any(message["role"] == "user" for message in messages):
        raise RowRejected("the conversation has no user turn")
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise RowRejected(f"`tools` is no list but {_kind(tools)}")
    return Conversation(messages, tools or None)


def _check_message(number: int, message: object) -> None:
    if not isinstance(message, dict):
        raise RowRejected(f"message {number} is no object but {_kind(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise RowRejected(f"message {number} has the unknown role {role!r}; known are {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        other = [part for part in content if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str))]
        if other:
            raise RowRejected(f"message {number} has content that is not text")
    elif content is not None and not isinstance(content, str):
        raise RowRejected(f"message {number} has content of another kind: {_kind(content)}")
    says_something = bool(content) or bool(message.get("tool_calls")) or bool(message.get("reasoning_content"))
    if not says_something and role in ("user", "assistant"):
        raise RowRejected(f"message {number} ({role}) is empty")


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
