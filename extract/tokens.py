"""From a conversation to tokens and a loss mask, with the target's own tokenizer and chat template.

The whole conversation is rendered once and tokenized once. Which tokens the assistant wrote is found by rendering what
came before each of its turns, never by looking for markers in the text, so that nothing a user writes can pass for one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..common.errors import InputError
from ..common.fingerprint import sha256_files
from .conversation import Conversation
from .rejects import RowRejected

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


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False, place: str = "--model") -> Any:
    """The tokenizer of a model folder. Raises InputError when it is missing, slow, untrusted or has no chat template."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputError("the model folder has no tokenizer", place=place, found=folder, expected="tokenizer.json", fix="fetch the model again")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        own_code = "trust_remote_code" in str(error)
        reason = "the tokenizer needs Python code of its own" if own_code else f"the tokenizer cannot be loaded: {_first_line(error)}"
        fix = "read that code, then add --trust-remote-code" if own_code else "fetch the model again"
        raise InputError(reason, place=place, found=folder, fix=fix) from None
    if not tokenizer.is_fast:
        raise InputError(
            "the tokenizer cannot say where in the text a token stands", place=place, found=type(tokenizer).__name__, expected="a fast tokenizer"
        )
    if not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template",
            place=place,
            found=folder,
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            fix="use the instruction-tuned model, or add its template",
        )
    return tokenizer


def tokenizer_hash(folder: Path) -> str:
    """sha256 of the tokenizer's files."""
    return sha256_files([folder / name for name in TOKENIZER_FILES])


def chat_template_hash(tokenizer: Any) -> str:
    """sha256 of the chat template, wherever it was stored."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


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


def sample_key(input_ids: np.ndarray, rest: bytes) -> bytes:
    """16 bytes that stand for what is fed to the target: ids, and the mask or the word `generate`."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.ascontiguousarray(input_ids, np.int32).tobytes())
    digest.update(b"\0")
    digest.update(rest)
    return digest.digest()


class ConversationTokenizer:
    """Turns conversations into ids and masks. Pure given its tokenizer."""

    def __init__(self, tokenizer: Any, end_ids: Collection[int], max_length: int, now: datetime | None = None) -> None:
        """now: the date for templates that print one, fixed so that a run resumed tomorrow gives the same ids. end_ids: tokens that may end a turn (`special_token_ids` and `eos_token_ids`). max_length: tokens."""
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self.max_length = max_length
        self._clock = {} if now is None else {"strftime_now": now.strftime}

    def document(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids int32 [T], loss_mask uint8 [T]); the mask is 1 on the assistant's tokens, end-of-turn included.

        Raises RowRejected: too long, nothing supervised, or a template in which the assistant's text cannot be found.
        """
        messages = conversation.messages
        turns = conversation.assistant_turns
        if not turns:
            raise RowRejected("there is no assistant turn to learn from")
        text = self._render(conversation, len(messages), answer=False)
        spans = [self._span(conversation, turn, text) for turn in turns]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        input_ids = np.asarray(encoded["input_ids"], np.int32)
        self._check_length(input_ids)
        starts, ends = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        loss_mask = np.zeros(len(input_ids), np.uint8)
        for start, end in spans:
            self._supervise(loss_mask, input_ids, starts, ends, start, end, text)
        if not loss_mask.any():
            raise RowRejected("no token is supervised")
        return input_ids, loss_mask

    def prompt(self, conversation: Conversation) -> np.ndarray:
        """input_ids int32 [T] of what the target is asked to answer, generation prompt included. Raises RowRejected."""
        messages = conversation.prompt()
        text = self._render(conversation, len(messages), answer=True)
        input_ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        self._check_length(input_ids)
        if len(input_ids) == self.max_length:
            raise RowRejected(f"the prompt has {len(input_ids)} tokens, which leaves no room for an answer; the limit is {self.max_length}")
        return input_ids

    def _check_length(self, input_ids: np.ndarray) -> None:
        if not len(input_ids):
            raise RowRejected("the chat template gives no text")
        if len(input_ids) > self.max_length:
            raise RowRejected(f"it has {len(input_ids)} tokens; the limit is {self.max_length}")

    def _render(self, conversation: Conversation, count: int, *, answer: bool) -> str:
        """The first `count` messages as text; with `answer` up to where the assistant begins to write."""
        try:
            text = self.tokenizer.apply_chat_template(
                conversation.messages[:count], tools=conversation.tools, tokenize=False, add_generation_prompt=answer, **self._clock
            )
        except Exception as error:  # templates raise what they like, and jinja what its sandbox meets
            raise RowRejected(f"the chat template refused it: {_first_line(error)}") from None
        return str(text)

    def _span(self, conversation: Conversation, turn: int, text: str) -> tuple[int, int]:
        """Characters of `text` that the assistant wrote in `turn`, with whatever the template puts behind them."""
        before = self._render(conversation, turn, answer=True)
        after = self._render(conversation, turn + 1, answer=False)
        if not (text.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise RowRejected(
                "the template rewrites earlier turns, so what the assistant wrote cannot be told apart; give one answer per row, or use --generate"
            )
        return len(before), len(after)

    def _supervise(self, loss_mask: np.ndarray, input_ids: np.ndarray, starts: np.ndarray, ends: np.ndarray, start: int, end: int, text: str) -> None:
        straddling = (starts < start) & (ends > start) | (starts < end) & (ends > end)
        if straddling.any():
            place = int(np.flatnonzero(straddling)[0])
            raise RowRejected(f"token {place} lies across the border of an assistant turn")
        inside = np.flatnonzero((starts >= start) & (ends <= end) & (ends > starts))
        closing = [place for place in inside if int(input_ids[place]) in self.end_ids]
        if closing and not text[ends[closing[-1]] : end].strip():
            last = closing[-1]  # the end-of-turn token; the white space behind it is the template's
        else:
            written = [place for place in inside if text[starts[place] : ends[place]].strip()]
            if not written:
                return
            last = written[-1]
        loss_mask[inside[inside <= last]] = 1


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
