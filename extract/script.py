"""Script: what a conversation asks of the target when it writes every answer itself, one after the other.

In: a checked Conversation. Out: rounds of given messages, each of which the target answers, and the key of each turn, which depends on
what is asked and never on what was answered. Knows no tokenizer.

The data's answers are left out. Two kinds of assistant turns stay as they are and are history: those that come before any question,
and those that call tools whose results follow, because these results belong to that call and to no other.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .conversation import Conversation, Message
from .rejects import RowRejected
from .sample_key import sample_key

GENERATE = b"generate"
"""Stands in a key where the mask of a given document stands."""


@dataclass(frozen=True)
class Script:
    """The turns that the target is to write. The prompt of turn k is round 0, answer 0, round 1, answer 1, ... round k."""

    rounds: tuple[list[Message], ...]
    keys: tuple[bytes, ...]
    """16 bytes for each turn."""
    stored: tuple[bytes, ...]
    """Those of the turns that end a sample to be stored, in order."""
    given_tokens: int
    """About what the last prompt has without its answers."""
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] = field(default_factory=dict)

    def stored_from(self, number: int) -> list[bytes]:
        """Keys of the samples that turn `number` or a later one ends."""
        return [key for key in self.keys[number:] if key in self.stored]

    def wanting(self, keys: Collection[bytes]) -> Script:
        """The same with fewer samples to be stored."""
        return replace(self, stored=tuple(key for key in self.keys if key in keys))

    def conversation(self, answers: Sequence[str]) -> Conversation:
        """The messages of the turn that comes after `answers`."""
        messages = list(self.rounds[0])
        for answer, given in zip(answers, self.rounds[1:], strict=False):
            messages += [{"role": "assistant", "content": answer}, *given]
        return Conversation(messages, self.tools, self.template_args)

    def answer_places(self, count: int) -> list[int]:
        """Indices in the messages of the first `count` answers."""
        places, place = [], 0
        for given in self.rounds[:count]:
            place += len(given)
            places.append(place)
            place += 1
        return places

    def to_json(self) -> bytes:
        """All of it, for `from_json`."""
        keys = [[key.hex() for key in some] for some in (self.keys, self.stored)]
        return json.dumps([self.rounds, *keys, self.given_tokens, self.tools, self.template_args], default=str).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Script:
        """What `to_json` wrote."""
        rounds, keys, stored, given_tokens, tools, template_args = json.loads(data)
        every, wanted = (tuple(bytes.fromhex(key) for key in some) for some in (keys, stored))
        return cls(tuple(rounds), every, wanted, given_tokens, tools, template_args)


def rounds_of(conversation: Conversation) -> list[list[Message]]:
    """The given messages before each answer that the target is to write. Raises RowRejected when there is nothing to answer."""
    rounds: list[list[Message]] = []
    for messages in (conversation.messages, *conversation.pending):
        given: list[Message] = []
        place = 0
        while place < len(messages):
            behind = place
            while behind < len(messages) and messages[behind]["role"] == "assistant":
                behind += 1
            answers = messages[place:behind]
            if not answers:
                given.append(messages[place])
                place += 1
                continue
            tool_follows = behind < len(messages) and messages[behind]["role"] == "tool"
            if tool_follows or not _asks(given):
                given += answers
            else:
                rounds.append(given)
                given = []
            place = behind
        if _asks(given):
            rounds.append(given)
        elif given or not rounds:
            raise RowRejected("there is no user turn to answer")
    return rounds


def _asks(given: list[Message]) -> bool:
    return bool(given) and given[-1]["role"] in ("user", "tool")


def turn_keys(conversation: Conversation, rounds: Sequence[list[Message]], first_prompt: np.ndarray) -> tuple[bytes, ...]:
    """A key for each turn. That of the first is the key of a conversation of one turn. first_prompt: int32 [T]."""
    asked = (
        json.dumps([rounds[: number + 1], conversation.tools, conversation.template_args], sort_keys=True, default=str).encode()
        for number in range(1, len(rounds))
    )
    return (sample_key(first_prompt, GENERATE), *(sample_key(first_prompt, GENERATE + later) for later in asked))


def most_rows(given_tokens: int, turns: int, samples: int, answer: int, longest: int) -> int:
    """Rows that the last `samples` of `turns` turns may have at most, with answers of `answer` tokens and no more than `longest` in all.

    The last token of an answer has no row.
    """
    return sum(min(given_tokens + number * answer, longest) - 1 for number in range(turns - samples + 1, turns + 1))
