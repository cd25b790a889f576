"""From a conversation, a plain text or given tokens to ids and a loss mask, with the target's own tokenizer.

A conversation is rendered whole, once, with the chat template, and tokenized once. Owns what is supervised, what is done with
documents that are too long, and the tokenizer's loading; where the assistant's text stands in a rendering is `spans`'.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..common.errors import InputError
from ..common.fingerprint import sha256_files
from .conversation import REASONING, Conversation
from .rejects import RowRejected
from .shapes import PlainText, TokenRow
from .spans import Span, Tokens, locate_turns, mark, narrow, tagged_turns
from .template import ChatTemplate, Rendering, check_template, first_line, no_template, read_template
from .template import chat_template_hash as chat_template_hash  # where its callers look for it

Supervise = Literal["all", "assistant", "last"]
Turns = Literal["all", "each"]
Overlong = Literal["reject", "truncate"]

NOT_PRESENT = "assistant text not fully present in the rendered text"
CROSSING = "a token lies across the border of an assistant turn and is not learned from"
CUT = "cut at the longest length"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False, place: str = "--model", chat_template: Path | str | None = None, need_template: bool = True
) -> Any:
    """The tokenizer of a model folder, with its own chat template or with `chat_template` (a file, or Jinja text) instead.

    need_template: refuse a tokenizer without one at once; else the first conversation is refused. Raises InputError when the
    tokenizer is missing, slow or untrusted, and for a template that is missing or no Jinja.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputError("the model folder has no tokenizer", place=place, found=folder, expected="tokenizer.json", fix="fetch the model again")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        own_code = "trust_remote_code" in str(error)
        reason = "the tokenizer needs Python code of its own" if own_code else f"the tokenizer cannot be loaded: {first_line(error)}"
        fix = "read that code, then add --trust-remote-code" if own_code else "fetch the model again"
        raise InputError(reason, place=place, found=folder, fix=fix) from None
    if not tokenizer.is_fast:
        raise InputError(
            "the tokenizer cannot say where in the text a token stands", place=place, found=type(tokenizer).__name__, expected="a fast tokenizer"
        )
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    if tokenizer.chat_template:
        check_template(tokenizer, place if chat_template is None else "--chat-template")
    elif need_template:
        raise no_template(place, folder)
    return tokenizer


def tokenizer_hash(folder: Path) -> str:
    """sha256 of the tokenizer's files."""
    return sha256_files([folder / name for name in TOKENIZER_FILES])


def special_token_ids(tokenizer: Any) -> list[int]:
    """Every id that is a special token, ascending."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(added | set(tokenizer.all_special_ids))


def eos_token_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Every id that ends an answer, ascending: the tokenizer's and those of generation_config.json and config.json."""
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            listed = json.loads((folder / name).read_bytes()).get("eos_token_id")
            found.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    return sorted(found)


@dataclass(frozen=True, eq=False)
class Tokenized:
    """One document: T tokens, and which of them are learned from. Both arrays belong to it alone."""

    input_ids: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """uint8 [T]."""
    turn: int | None = None
    """Index of the assistant message that is supervised; None when there is more than one, or no messages."""
    notes: tuple[str, ...] = ()
    """What happened to it that is no reason to reject it; to be counted."""


@dataclass(frozen=True)
class RefusedTurn:
    """An assistant turn that cannot be a document of its own, and why."""

    turn: int
    """Index of its message."""
    reason: str


@dataclass(frozen=True, eq=False)
class Question:
    """What the target is asked to answer, the generation prompt included. T tokens."""

    text: str
    input_ids: np.ndarray
    """int32 [T]."""
    tokens: Tokens


class ConversationTokenizer:
    """Turns conversations, plain texts and given tokens into ids and masks. Pure given its tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Collection[int],
        max_length: int,
        now: datetime | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
        supervise: Supervise = "assistant",
        turns: Turns = "all",
        overlong: Overlong = "reject",
        min_supervised: int = 1,
    ) -> None:
        """end_ids: tokens that may end a turn (`special_token_ids` and `eos_token_ids`). max_length: tokens. now: the date for
        templates that print one, fixed so that a run resumed tomorrow gives the same ids.

        supervise: every token, the assistant's, or those of the last assistant turn. turns: a conversation is one document, or
        each assistant turn ends one. overlong: what to do with more than max_length tokens. min_supervised: fewer supervised
        tokens, after the cut, reject a document. Raises InputError for settings that contradict each other.
        """
        if turns == "each" and supervise != "assistant":
            raise InputError(
                "learns from one assistant turn per sample", place="--turns each", found=f"--supervise {supervise}", fix="leave one of them out"
            )
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self.max_length = max_length
        self.template = ChatTemplate(tokenizer, now, template_args)
        self.supervise, self.turns, self.overlong, self.min_supervised = supervise, turns, overlong, min_supervised
        self._prompt_ids: dict[str, frozenset[int]] = {}

    def documents(self, content: Conversation | PlainText | TokenRow) -> list[Tokenized | RefusedTurn]:
        """The documents of what a row holds: one, or with `turns` "each" one or a RefusedTurn for every assistant turn.

        Raises RowRejected when the row cannot be used at all, InputError for a conversation without a chat template.
        """
        if isinstance(content, PlainText):
            return [self.text_document(content.text)]
        if isinstance(content, TokenRow):
            return [self.token_document(content)]
        messages, assistant = content.messages, content.assistant_turns
        if not assistant and self.supervise != "all":
            raise RowRejected("there is no assistant turn to learn from")
        if self.turns == "all":
            return [self._conversation(content, len(messages), assistant[-1:] if self.supervise == "last" else assistant)]
        found: list[Tokenized | RefusedTurn] = []
        for turn in assistant:
            try:
                found.append(self._conversation(content, turn + 1, [turn]))
            except RowRejected as rejected:
                found.append(RefusedTurn(turn, str(rejected)))
        return found

    def text_document(self, text: str) -> Tokenized:
        """A plain text, all of it supervised, with the special tokens that the tokenizer adds; never two BOS. Raises RowRejected."""
        ids, bos = self._encode(text, special=True).ids, self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos] and self._encode(text).ids == ids[1:]:
            ids = ids[1:]  # the text brings its own
        input_ids = np.array(ids, np.int32)
        return self._finished(input_ids, np.ones(len(input_ids), np.uint8))

    def token_document(self, row: TokenRow) -> Tokenized:
        """Given tokens and their mask, copied; without a mask all are supervised. Raises RowRejected."""
        input_ids = np.array(row.input_ids, np.int32)
        loss_mask = np.ones(len(input_ids), np.uint8) if row.loss_mask is None else np.array(row.loss_mask, np.uint8)
        assert input_ids.shape == loss_mask.shape, "TokenRow is checked by shapes"
        return self._finished(input_ids, loss_mask)

    def prompt(self, conversation: Conversation) -> np.ndarray:
        """input_ids int32 [T] of everything before a final assistant turn, as `question` gives them. Raises RowRejected."""
        return self.question(replace(conversation, messages=conversation.prompt())).input_ids

    def question(self, conversation: Conversation) -> Question:
        """The messages as the target sees them when it is asked to answer. Raises RowRejected, also when there is no room for an answer."""
        text = self._rendering(conversation)(conversation.messages, answer=True)
        encoding = self._encode(text)
        input_ids = np.array(encoding.ids, np.int32)
        self._check_length(input_ids, "reject")
        if len(input_ids) == self.max_length:
            raise RowRejected(f"the prompt has {len(input_ids)} tokens, which leaves no room for an answer; the limit is {self.max_length}")
        return Question(text, input_ids, Tokens(encoding, text))

    def _rendering(self, conversation: Conversation) -> Rendering:
        return self.template.for_row(conversation.tools, conversation.template_args)

    def _conversation(self, conversation: Conversation, count: int, turns: Sequence[int]) -> Tokenized:
        """The first `count` messages as one document, supervised in `turns`. Raises RowRejected."""
        messages, render = conversation.messages[:count], self._rendering(conversation)
        text = render(messages)
        encoding = self._encode(text)
        input_ids = np.array(encoding.ids, np.int32)
        self._check_length(input_ids, self.overlong)
        if self.supervise == "all":
            return self._finished(input_ids, np.ones(len(input_ids), np.uint8))
        prompt = self.template.generation_prompt(conversation.template_args)
        tagged = render.generation_spans(messages, text)
        written = self._written(text, messages, turns, render, prompt, tagged)
        learned = written if tagged is None else narrow(written, tagged)
        loss_mask, crossing = mark(learned, input_ids, Tokens(encoding, text), self.end_ids.difference(self._ids_of(prompt or "")))
        notes = (NOT_PRESENT,) * (not all(_is_present(messages[turn], text, written, turn) for turn in turns)) + (CROSSING,) * bool(crossing)
        return self._finished(input_ids, loss_mask, turns[0] if len(turns) == 1 else None, notes)

    def _written(
        self,
        text: str,
        messages: list[dict[str, Any]],
        turns: Sequence[int],
        render: Rendering,
        prompt: str | None,
        tagged: list[tuple[int, int]] | None,
    ) -> list[Span]:
        """Where the turns stand in the text; only where they cannot be located, by the template's generation tags alone."""
        try:
            return locate_turns(text, messages, turns, render, prompt or "")
        except RowRejected:
            if tagged is None or prompt is None:
                raise
            assistant = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            return tagged_turns(text, tagged, assistant, turns, prompt)

    def _ids_of(self, prompt: str) -> frozenset[int]:
        """Tokens of a generation prompt; they begin turns and do not end them."""
        if prompt not in self._prompt_ids:
            self._prompt_ids[prompt] = frozenset(self._encode(prompt).ids)
        return self._prompt_ids[prompt]

    def _encode(self, text: str, *, special: bool = False) -> Any:
        """The `tokenizers.Encoding` of a text; `special`: with the tokens that the tokenizer adds. Raises RowRejected."""
        try:
            return self.tokenizer(text, add_special_tokens=special).encodings[0]
        except (TypeError, UnicodeError):  # JSON can spell half of a character
            raise RowRejected("its text cannot be tokenized: it is no valid Unicode") from None

    def _check_length(self, input_ids: np.ndarray, overlong: Overlong) -> None:
        if not len(input_ids):
            raise RowRejected("it has no tokens")
        if overlong == "reject" and len(input_ids) > self.max_length:
            raise RowRejected(f"it has {len(input_ids)} tokens; the limit is {self.max_length}")

    def _finished(self, input_ids: np.ndarray, loss_mask: np.ndarray, turn: int | None = None, notes: tuple[str, ...] = ()) -> Tokenized:
        """The rules of length and of supervision, in this order, whatever the document was made from."""
        self._check_length(input_ids, self.overlong)
        if len(input_ids) > self.max_length:
            input_ids, loss_mask, notes = input_ids[: self.max_length].copy(), loss_mask[: self.max_length].copy(), (*notes, CUT)
        supervised = int(loss_mask.sum())
        if supervised < self.min_supervised:
            kept = f" in the first {self.max_length}" if CUT in notes else ""
            raise RowRejected(
                f"{supervised} tokens are supervised{kept}; the least is {self.min_supervised}" if supervised else f"no token is supervised{kept}"
            )
        return Tokenized(input_ids, loss_mask, turn, notes)


def _is_present(message: dict[str, Any], text: str, spans: Sequence[Span], turn: int) -> bool:
    """Does the text hold the turn's answer, its reasoning and its calls' names? White space aside, which templates trim and add."""
    written = "".join(text[span.start : span.end] for span in spans if span.turn == turn)
    said = [message[name] for name in ("content", *REASONING) if isinstance(message.get(name), str)]
    said += [str(call.get("function", call).get("name", "")) for call in message.get("tool_calls", [])]
    return all(one.strip() in written or "".join(one.split()) in "".join(written.split()) for one in said)
