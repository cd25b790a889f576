"""From a dataset's row to what can be trained on: a conversation, a plain text, or tokens. Owns the datasets' column names.

In: a row, and what the user said of the columns. Out: a ParsedRow, or a RowRejected with one sentence. The shape of a row is
the first of these whose column it has (a null counts as absent), unless the user forces one:

    messages         `messages`, each with role and content
    sharegpt         `conversations`, each turn with from and value (or role and content); function_call and observation are tool turns
    alpaca           `instruction` and no other prompt column; with input, output, system, history
    prompt-response  a prompt (text or messages) and perhaps its response; `turns`, the user's turns without answers
    tokens           `input_ids`, with loss_mask, labels or assistant_masks
    text             `text`

Chats come first because their text can be rendered for any target, whereas nothing says whose tokens `input_ids` are. Columns
that the user names decide the shape by themselves. A row without an answer is a prompt, for `--generate`. Of several turns
without answers the first is the prompt and the others are `pending`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.errors import InputError
from .conversation import ROLES, Conversation, from_json, kind_of, make_conversation
from .rejects import RowRejected

COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations", "conversation"),
    "instruction": ("instruction",),
    "input": ("input", "context"),
    "output": ("output", "response", "completion", "answer"),
    "history": ("history",),
    "prompt": ("prompt", "question", "query", "problem", "instruction"),
    "turns": ("turns",),
    "response": ("response", "completion", "output", "solution", "canonical_solution", "answer", "chosen"),
    "input_ids": ("input_ids",),
    "loss_mask": ("loss_mask",),
    "labels": ("labels",),
    "assistant_masks": ("assistant_masks", "assistant_mask"),
    "attention_mask": ("attention_mask",),
    "text": ("text",),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
    "chat_template_kwargs": ("chat_template_kwargs",),
}
"""Our name of a column, and those under which datasets have it; the first that is there counts."""
KEYS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction",),
    "prompt-response": ("prompt", "turns"),
    "tokens": ("input_ids",),
    "text": ("text",),
}
"""The shapes in the order in which they are looked for, and the columns of which each needs one."""
DECISIVE = {"output": "alpaca", "response": "prompt-response"} | {name: shape for shape, names in KEYS.items() for name in names}
"""The shape that a column has when the user names that column."""
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"} | dict.fromkeys(
    ("observation", "function_response", "tool_response"), "tool"
)
CALLS = ("function_call", "tool_call")
"""Whose turn is a call of a tool, as JSON."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
UNSUPERVISED = -100
"""The label of a token that carries no loss."""


@dataclass(frozen=True)
class PlainText:
    """Text that no chat template is put around."""

    text: str


@dataclass(frozen=True, eq=False)
class TokenRow:
    """A document that was tokenized before."""

    input_ids: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray | None
    """uint8 [T], 1 where the token carries loss; None when the row does not say."""


@dataclass(frozen=True)
class ParsedRow:
    """What a row holds."""

    shape: str
    """One of KEYS."""
    value: Conversation | PlainText | TokenRow


def parse_row(
    value: object, data_format: str | None = None, columns: Mapping[str, str] | None = None, roles: Mapping[str, str] | None = None
) -> ParsedRow:
    """Read a row in its shape.

    data_format: one of KEYS; None finds out. columns: our name of a column (COLUMNS) and the dataset's. roles: a role of the
    dataset and the one it stands for. `check_reading` says whether these are possible. Raises RowRejected with the reason.
    """
    if not isinstance(value, dict):
        raise RowRejected(f"the row is no object but {kind_of(value)}")
    row = _Columns(value, columns or {}, roles or {})
    shape = data_format or row.shape()
    if shape != "tokens" and (media := [name for name in MEDIA if value.get(name)]):
        raise RowRejected(f"the row has `{media[0]}`, which is no text")
    return ParsedRow(shape, _PARSERS[shape](row))


def check_reading(data_format: str | None, columns: Mapping[str, str], roles: Mapping[str, str]) -> None:
    """Raise InputError for a shape, a column or a role that there is not, or a role that must never be learned from."""
    if data_format is not None and data_format not in KEYS:
        raise InputError("no such shape of rows", place="--data-format", found=data_format, expected=", ".join(KEYS))
    for name in columns:
        if name not in COLUMNS:
            raise InputError(
                "no such column", place=f"--column {name}={columns[name]}", expected=f"NAME=COLUMN with NAME one of {', '.join(COLUMNS)}"
            )
    shapes = {DECISIVE[name] for name in columns if name in DECISIVE} | ({data_format} if data_format else set())
    if len(shapes) > 1:
        raise InputError(
            "no row has columns of several shapes", place="--column", found=", ".join(columns), expected=f"those of {' or '.join(sorted(shapes))}"
        )
    for name, role in roles.items():
        if role not in ROLES:
            raise InputError("no such role", place=f"--role {name}={role}", expected=f"NAME=ROLE with ROLE one of {', '.join(ROLES)}")
        if role == "assistant" and name in ROLES and name != role:
            raise InputError(f"would teach the drafter what the {name} wrote", place=f"--role {name}={role}", fix="leave it out")


@dataclass(frozen=True)
class _Columns:
    """A row under our names."""

    row: dict[Any, Any]
    columns: Mapping[str, str]
    roles: Mapping[str, str]

    def label(self, name: str) -> str:
        """The dataset's name of our column `name`: the user's, else the first that the row has, else the usual one."""
        if name in self.columns:
            return self.columns[name]
        named = set(self.columns.values())  # what the user has given another name is no longer this
        return next((known for known in COLUMNS[name] if self.row.get(known) is not None and known not in named), COLUMNS[name][0])

    def get(self, name: str) -> Any:
        value = self.row.get(self.label(name))
        return None if isinstance(value, float) and value != value else value  # tables write an absent text as NaN

    def need(self, name: str) -> Any:
        """Raises RowRejected when it is absent."""
        value, label = self.get(name), self.label(name)
        if value is None:
            there = ", ".join(str(column) for column in self.row if self.row[column] is not None)
            raise RowRejected(f"`{label}` is null" if label in self.row else f"the row has no `{label}`: its columns are {there or 'none'}")
        return value

    def text(self, name: str) -> str:
        """The column's text, empty when it is absent. Raises RowRejected for what is no text; a number is taken as written."""
        value = self.get(name)
        if value is None or isinstance(value, str):
            return value or ""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RowRejected(f"`{self.label(name)}` is no text but {kind_of(value)}")
        return str(value)

    def shape(self) -> str:
        for name in self.columns:
            if name in DECISIVE:
                return DECISIVE[name]
        for shape, names in KEYS.items():
            if any(self.get(name) is not None for name in names) and not (shape == "alpaca" and self.label("prompt") != "instruction"):
                return shape
        for names in KEYS.values():
            if self.label(names[0]) in self.row:
                self.need(names[0])
        there = ", ".join(str(column) for column in self.row)
        raise RowRejected(f"the row has no shape that is known: its columns are {there or 'none'}")

    def conversation(self, messages: object, *, column: str, pending: list[Any] | None = None) -> Conversation:
        """With the system turn, tools and template arguments that the row keeps beside its messages."""
        system = self.text("system")
        if system and isinstance(messages, list) and not (messages and isinstance(messages[0], dict) and messages[0].get("role") == "system"):
            messages = [{"role": "system", "content": system}, *messages]
        return make_conversation(
            messages, self.get("tools"), self.get("chat_template_kwargs"), roles=self.roles, pending=pending or [], column=self.label(column)
        )


def _messages(row: _Columns) -> Conversation:
    return row.conversation(_turns(row.need("messages"), row.roles), column="messages")


def _sharegpt(row: _Columns) -> Conversation:
    turns = _turns(row.need("conversations"), row.roles)
    if isinstance(turns, list):  # here the roles may have ShareGPT's names too
        turns = [turn | {"role": _role(turn.get("role"), row.roles)} if isinstance(turn, dict) else turn for turn in turns]
    return row.conversation(turns, column="conversations")


def _alpaca(row: _Columns) -> Conversation:
    row.need("instruction")
    messages: list[dict[str, Any]] = []
    history = from_json(row.get("history"))
    for pair in history if isinstance(history, list) else [history] if history else []:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise RowRejected(f"`{row.label('history')}` is no list of pairs of question and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n\n".join(text for text in (row.text("instruction"), row.text("input")) if text)
    answer = row.text("output")
    messages += [{"role": "user", "content": question}] + ([{"role": "assistant", "content": answer}] if answer else [])
    return row.conversation(messages, column="instruction")


def _prompt_response(row: _Columns) -> Conversation:
    column = "turns" if row.get("prompt") is None and row.get("turns") is not None else "prompt"
    given = from_json(row.need(column)) if column == "turns" else row.need(column)
    rounds = given if isinstance(given, list) and given and (column == "turns" or isinstance(given[0], list)) else [given]
    asked, *pending = [_turns(_as_messages(part, "user"), row.roles) for part in rounds]
    answer = row.get("response")
    if answer not in (None, "") and not pending:
        answers = _turns(_as_messages(row.text("response") if isinstance(answer, int | float) else answer, "assistant"), row.roles)
        if isinstance(asked, list) and isinstance(answers, list):
            asked = answers if answers[: len(asked)] == asked else [*asked, *answers]  # some repeat the prompt before the answer
    return row.conversation(asked, column=column, pending=pending)


def _as_messages(value: object, role: str) -> object:
    """Text as a message of `role`. A table may keep messages as JSON; any other text is what somebody said, even if it is JSON."""
    spelled = from_json(value)
    if isinstance(spelled, list) and spelled and all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in spelled):
        return spelled
    return [{"role": role, "content": value}] if isinstance(value, str) else [value] if isinstance(value, dict) else value


def _turns(turns: object, roles: Mapping[str, str]) -> object:
    """A list whose turns with from and value have role and content; anything else as it is, to be judged as a message."""
    turns = from_json(turns)
    return [_turn(number, from_json(turn), roles) for number, turn in enumerate(turns)] if isinstance(turns, list) else turns


def _turn(number: int, turn: object, roles: Mapping[str, str]) -> object:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    speaker, said = turn["from"], turn.get("value")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if isinstance(speaker, str) and speaker in CALLS and speaker not in roles:
        calls = from_json(said)
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, dict) for call in calls):
            raise RowRejected(f"message {number} ({speaker}) is no JSON of a tool call")
        return others | {"role": "assistant", "content": "", "tool_calls": calls}
    return others | {"role": _role(speaker, roles), "content": said}


def _role(name: object, roles: Mapping[str, str]) -> object:
    """OpenAI's role for ShareGPT's `name`, unless the user has given it one."""
    return SHAREGPT_ROLES.get(name, name) if isinstance(name, str) and name not in roles else name


def _text(row: _Columns) -> PlainText:
    row.need("text")
    if not row.text("text"):
        raise RowRejected(f"`{row.label('text')}` is empty")
    return PlainText(row.text("text"))


def _tokens(row: _Columns) -> TokenRow:
    ids, label = _integers(row.need("input_ids"), row.label("input_ids")), row.label("input_ids")
    if not ids:
        raise RowRejected(f"`{label}` is empty")
    wrong = next((place for place, token in enumerate(ids) if not 0 <= token < 2**31), None)
    if wrong is not None:
        raise RowRejected(f"`{label}` has {ids[wrong]} at {wrong}, which is no token id")
    if row.get("attention_mask") is not None and 0 in _mask(row, "attention_mask", ids):
        raise RowRejected(f"`{row.label('attention_mask')}` hides some tokens, but rows must come without padding")
    given = next((name for name in ("loss_mask", "labels", "assistant_masks") if row.get(name) is not None), None)
    mask = None if given is None else _labels(row, ids) if given == "labels" else _mask(row, given, ids)
    return TokenRow(np.asarray(ids, np.int32), None if mask is None else np.asarray(mask, np.uint8))


def _integers(values: object, label: str, length: int | None = None) -> list[int]:
    values = from_json(values)
    if not isinstance(values, list):
        raise RowRejected(f"`{label}` is no list but {kind_of(values)}")
    wrong = next((place for place, value in enumerate(values) if type(value) is not int), None)
    if wrong is not None:
        raise RowRejected(f"`{label}` has {kind_of(values[wrong])} at {wrong} where a whole number belongs")
    if length is not None and len(values) != length:
        raise RowRejected(f"`{label}` has {len(values)} entries for {length} tokens")
    return values


def _mask(row: _Columns, name: str, ids: list[int]) -> list[int]:
    given, label = from_json(row.need(name)), row.label(name)
    if isinstance(given, list):  # some write true or 1.0
        given = [int(value) if isinstance(value, bool | float) and value in (0, 1) else value for value in given]
    mask = _integers(given, label, len(ids))
    wrong = next((place for place, value in enumerate(mask) if value not in (0, 1)), None)
    if wrong is not None:
        raise RowRejected(f"`{label}` has {mask[wrong]} at {wrong} where 0 or 1 belongs")
    return mask


def _labels(row: _Columns, ids: list[int]) -> list[int]:
    label = row.label("labels")
    labels = _integers(row.need("labels"), label, len(ids))
    wrong = next((place for place, token in enumerate(ids) if labels[place] not in (UNSUPERVISED, token)), None)
    if wrong is not None:
        raise RowRejected(
            f"`{label}` has {labels[wrong]} at {wrong} where the token is {ids[wrong]}; it must be that token, unshifted, or {UNSUPERVISED}"
        )
    return [int(value != UNSUPERVISED) for value in labels]


_PARSERS: dict[str, Callable[[_Columns], Conversation | PlainText | TokenRow]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt-response": _prompt_response,
    "tokens": _tokens,
    "text": _text,
}
