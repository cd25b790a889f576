"""The target's chat template: where it comes from, its hash, and text rendered with it, always with the same arguments.

In: messages, tools and template arguments. Out: text, the text of the generation prompt, and where the template's own
`{% generation %}` tags stand. Every rendering goes through the tokenizer's `apply_chat_template`; there is no second one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..common.errors import InputError
from .conversation import NOT_FOR_ROWS
from .rejects import RowRejected

GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
PROBE_DIGITS = "735201984406173928850391"
"""Digits, because templates that change letters leave them alone."""


def read_template(given: Path | str, place: str = "--chat-template") -> str:
    """The Jinja text that `given` is, or that stands in the file of that name. Raises InputError."""
    if isinstance(given, str) and ("{" in given or "\n" in given):
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {first_line(error)}"
        raise InputError(reason, place=place, found=given, expected="a file of Jinja text, or the text itself") from None


def check_template(tokenizer: Any, place: str) -> None:
    """Raise InputError, with the line, when a template of the tokenizer is no Jinja."""
    import jinja2

    templates = tokenizer.chat_template
    for name, text in templates.items() if isinstance(templates, dict) else [("", templates)]:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], chat_template=text, tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            what = f"the chat template {name}".strip()
            raise InputError(f"{what} is no valid Jinja: {first_line(error)}", place=place, found=f"line {error.lineno}") from None
        except Exception:  # it may want more than one message; each row will tell
            continue


def no_template(place: str, found: object) -> InputError:
    """The error of a tokenizer without a chat template where one is needed."""
    return InputError(
        "the tokenizer has no chat template",
        place=place,
        found=found,
        expected="chat_template.jinja, or chat_template in tokenizer_config.json",
        fix="use the instruction-tuned model, give a template with --chat-template, or rows of plain text or tokens",
    )


def chat_template_hash(tokenizer: Any) -> str:
    """sha256 of the chat template in use, wherever it came from; of `null` when there is none."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Rendering:
    """How one row's messages become text: with its tools and its template arguments, the same every time."""

    tokenizer: Any
    tools: list[dict[str, Any]] | None
    arguments: Mapping[str, Any]

    def __call__(self, messages: list[dict[str, Any]], *, answer: bool = False, template: str | None = None) -> str:
        """The text; `answer`: with the generation prompt behind; `template`: in place of the tokenizer's.

        Raises RowRejected with the template's own words.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=self.tools, chat_template=template, add_generation_prompt=answer, tokenize=False, **self.arguments
            )
        except Exception as error:  # templates raise what they like, and jinja what its sandbox meets
            raise RowRejected(f"the chat template refused it: {first_line(error)}") from None
        return str(text)

    def generation_spans(self, messages: list[dict[str, Any]], text: str) -> list[tuple[int, int]] | None:
        """Characters of `text`, the rendering of `messages`, between the template's generation tags; None without tags.

        The tags are replaced by marks that are printed, so that tags in macros and captured blocks are followed too.
        Raises RowRejected when the marks change the text.
        """
        template = self.tokenizer.get_chat_template(tools=self.tools)
        if not GENERATION_TAG.search(template):
            return None
        stem = unused_digits(text)
        # An `if` in place of the tag, because jinja trims white space around blocks and not around what is printed.
        printing = GENERATION_TAG.sub(lambda tag: f"{{%{tag[1]} if true %}}{stem}{'01'[bool(tag[2])]}{{% endif {tag[3]}%}}", template)
        plain, spans, opened = "", [], []
        for number, piece in enumerate(re.split(f"{stem}([01])", self(messages, template=printing))):
            if number % 2 == 0:
                plain += piece
            elif piece == "0":
                opened.append(len(plain))
            elif opened:
                spans.append((opened.pop(), len(plain)))
        if plain != text or opened:
            raise RowRejected("the template's generation tags cannot be followed")
        return sorted(spans)


class ChatTemplate:
    """The template of `tokenizer` with the arguments of all rows. Pure, apart from what it remembers of generation prompts."""

    def __init__(self, tokenizer: Any, now: datetime | None = None, template_args: Mapping[str, Any] | None = None) -> None:
        """now: the date for templates that print one. Raises InputError for an argument that cannot be given."""
        for name in template_args or {}:
            if name in NOT_FOR_ROWS or name.startswith(("return_", "add_", "continue_")):
                raise InputError("is no argument of the chat template", place=f"--template-arg {name}", fix="leave it out")
        self.tokenizer = tokenizer
        self._arguments = {} if now is None else {"strftime_now": now.strftime}
        self._arguments.update(template_args or {})
        self._prompts: dict[str, str | None] = {}

    def for_row(self, tools: list[dict[str, Any]] | None, row_args: Mapping[str, Any]) -> Rendering:
        """A row's rendering; its own arguments win over those of all rows. Raises InputError when there is no template."""
        if not self.tokenizer.chat_template:
            raise no_template("--model", getattr(self.tokenizer, "name_or_path", None))
        return Rendering(self.tokenizer, tools, {**self._arguments, **row_args})

    def generation_prompt(self, row_args: Mapping[str, Any]) -> str | None:
        """What the template puts behind a question to make the target answer, perhaps nothing; None when that cannot be told.

        Learned from a question of our own, so that no row can influence another's.
        """
        key = json.dumps(row_args, sort_keys=True, default=str)
        if key not in self._prompts:
            question, render = [{"role": "user", "content": PROBE_DIGITS}], self.for_row(None, row_args)
            try:
                without, asked = render(question), render(question, answer=True)
                self._prompts[key] = asked[len(without) :] if asked.startswith(without) else None
            except RowRejected:
                self._prompts[key] = None
        return self._prompts[key]


def unused_digits(text: str) -> str:
    """24 digits that do not occur in `text`."""
    stem = PROBE_DIGITS
    while stem in text:
        stem = str(int(stem) + 1)
    return stem


def first_line(error: Exception) -> str:
    """Of an error's message; its class's name when it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
