"""Which characters of a rendered conversation the assistant wrote, and which tokens are made of nothing else.

In: the rendered text, the messages, and a way to render others. Out: a Span for each turn, and a mask. Nothing is searched
in the text by its markers, so that nothing a user writes can pass for an assistant's turn. Instead the conversation is
rendered again with digits in place of what the assistant wrote: what stands between the digits is the template's and the
users', and where that is found again, in its order and from the first character on, what lies between is the assistant's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .rejects import RowRejected
from .template import unused_digits

Messages = list[dict[str, Any]]


class Render(Protocol):
    """Messages as text; `answer`: with the generation prompt behind. Raises RowRejected."""

    def __call__(self, messages: Messages, *, answer: bool = False) -> str: ...


@dataclass(frozen=True)
class Span:
    """Characters start..end of a text that the target writes in one turn, without what the template puts behind them."""

    turn: int
    """Index of its message."""
    start: int
    end: int
    closed: bool | None = False
    """The end-of-turn marker is already inside, so none is looked for behind; None: its last token tells."""


def locate_turns(text: str, messages: Messages, turns: Sequence[int], render: Render, generation_prompt: str) -> list[Span]:
    """The Span of each of `turns` (indices of assistant messages, ascending) in `text`, the rendering of `messages`.

    A span starts where the generation prompt ends, or behind it, where the template's own text ends: an empty thought that
    the template adds is not the assistant's, white space before the answer is. Raises RowRejected when it cannot be known.
    """
    around = _around(text, messages, turns, render)
    halves: dict[int, list[str] | None] = {}
    spans: list[Span] = []
    floor = 0  # nothing before it can belong to the turn
    known: int | None = 0  # where the piece of template text before the turn must begin
    for number, turn in enumerate(turns):
        opening = closing = None
        if around is not None:
            opening = _behind(text, around[number], known)
            if turn == turns[-1]:
                closing = _before(text, around[-1])
            elif opening is not None:
                closing = _plain_end(text, messages[turn], opening, around[number + 1])
            if closing is None and number + 2 < len(turns):
                half = number % 2
                if half not in halves:
                    halves[half] = _around(text, messages, turns[1 - half :: 2], render)
                closing = _end_between(text, halves[half], number, known, around[number + 1])
        if closing is None and len(turns) > 1:
            alone = _around(text, messages, [turn], render)
            if alone is not None:
                opening, closing = _behind(text, alone[0], 0), _before(text, alone[1])
        span = _span(text, messages, turn, opening, closing, floor, render, generation_prompt)
        spans.append(span)
        floor, known = span.end, closing
    return spans


def _around(text: str, messages: Messages, turns: Sequence[int], render: Render) -> list[str] | None:
    """The text before, between and behind `turns` when each says nothing but digits; None when the template hides one."""
    stem = unused_digits(text)
    probed = list(messages)
    for number, turn in enumerate(turns):
        probed[turn] = {"role": messages[turn]["role"], "content": f"{stem}{number:06d}"}
    try:
        rest = render(probed)
    except RowRejected:
        return None
    pieces = []
    for number in range(len(turns)):
        piece, found, rest = rest.partition(f"{stem}{number:06d}")
        if not found:  # or printed out of order
            return None
        pieces.append(piece)
    return None if stem in rest else [*pieces, rest]


def _behind(text: str, piece: str, place: int | None) -> int | None:
    return place + len(piece) if place is not None and text.startswith(piece, place) else None


def _before(text: str, piece: str) -> int | None:
    return len(text) - len(piece) if text.endswith(piece) else None


def _plain_end(text: str, message: dict[str, Any], opening: int, following: str) -> int | None:
    """Where a turn that is its content and nothing else ends: the content stands there and the template goes on behind it."""
    for written in (message["content"], message["content"].strip()):
        if text.startswith(written, opening) and text.startswith(following, opening + len(written)):
            return opening + len(written)
    return None


def _end_between(text: str, half: list[str] | None, number: int, known: int | None, following: str) -> int | None:
    """Where turn `number` ends, from a rendering in which every second turn is digits and this one stands between two of them.

    So a conversation of many tool calls takes two more renderings and not one for each.
    """
    next_opening = _behind(text, half[(number + number % 2) // 2], known) if half is not None else None
    if next_opening is None or not text.startswith(following, next_opening - len(following)):
        return None
    return next_opening - len(following)


def _span(
    text: str, messages: Messages, turn: int, opening: int | None, closing: int | None, floor: int, render: Render, generation_prompt: str
) -> Span:
    """opening, closing: where the content begins, and where the turn ends, as far as that is known."""
    start = _start(text, messages, turn, opening, closing, render, generation_prompt)
    if start is None:
        raise RowRejected(
            f"message {turn} does not begin where the generation prompt before it ends, so what the assistant wrote cannot be told apart; "
            "make the template arguments fit the rows, take one assistant turn per sample, or let the target write the answers"
        )
    if closing is not None:
        span = Span(turn, start, closing)
    else:
        upto = _or_none(render, messages[: turn + 1])
        if upto is None or not text.startswith(upto):
            raise RowRejected(
                f"the template rewrites message {turn} when others follow, so what the assistant wrote cannot be told apart; "
                "take one assistant turn per sample, or let the target write the answers"
            )
        span = Span(turn, start, max(start, len(upto.rstrip())), closed=True)
    if not floor <= span.start <= span.end:
        raise RowRejected(f"message {turn} does not stand where the template puts assistant turns")
    return span


def _start(text: str, messages: Messages, turn: int, opening: int | None, closing: int | None, render: Render, generation_prompt: str) -> int | None:
    """Where the target begins to write: where the generation prompt ends, unless the template says more before the content."""
    if opening is None:
        before = _or_none(render, messages[:turn], answer=True)
        return len(before) if before is not None and text.startswith(before) else None
    first = opening
    while first and text[first - 1].isspace():
        first -= 1
    if generation_prompt.strip():  # it ends here, or some white space before, or reaches into what the row gave
        size = len(generation_prompt)
        for end in range(min(opening + size - 1, len(text) if closing is None else closing), max(first, size) - 1, -1):
            if text.startswith(generation_prompt, end - size):
                return end
    elif first < opening:
        before = _or_none(render, messages[:turn], answer=True)
        if before is not None and text.startswith(before) and first <= len(before) < opening:
            return len(before)
    return opening


def _or_none(render: Render, messages: Messages, *, answer: bool = False) -> str | None:
    try:
        return render(messages, answer=answer)
    except RowRejected:
        return None


def narrow(spans: Sequence[Span], tagged: Sequence[tuple[int, int]]) -> list[Span]:
    """What of `spans` lies between generation tags. A span that its tag cuts short is closed: what follows is not its end."""
    found = []
    for span in spans:
        for start, end in tagged:
            part = Span(span.turn, max(span.start, start), min(span.end, end), closed=span.closed or end < span.end)
            if part.start < part.end or part.start == part.end == span.end == span.start:
                found.append(part)
    return found


def tagged_turns(text: str, tagged: Sequence[tuple[int, int]], assistant: Sequence[int], turns: Sequence[int], generation_prompt: str) -> list[Span]:
    """The Spans of `turns` by generation tags alone, one tag for each of the `assistant` turns, without the generation prompt.

    Raises RowRejected when there are more or fewer tags than turns.
    """
    if len(tagged) != len(assistant):
        raise RowRejected(f"the template has generation tags around {len(tagged)} texts, and there are {len(assistant)} assistant turns")
    spans = []
    for turn, (start, end) in zip(assistant, tagged, strict=True):
        start += len(generation_prompt) if text.startswith(generation_prompt, start, end) else 0
        spans.append(Span(turn, start, max(start, len(text[:end].rstrip())), closed=None))
    return [span for span in spans if span.turn in turns]


class Tokens:
    """Where the tokens of one text stand in it, each asked for when needed: a list of them all takes as long as tokenizing."""

    def __init__(self, encoding: Any, text: str) -> None:
        """encoding: a `tokenizers.Encoding` of `text`, without added special tokens."""
        self._encoding, self._text, self._count = encoding, text, len(encoding)

    def __len__(self) -> int:
        return self._count

    def start(self, place: int) -> int:
        """Its first character. White space that some tokenizers leave out of a token's place belongs to the token behind it."""
        start = int(self._encoding.token_to_chars(place)[0])
        before = self.end(place - 1) if place else 0
        return before if before < start and self._text[before:start].isspace() else start

    def end(self, place: int) -> int:
        """The character behind its last one."""
        return int(self._encoding.token_to_chars(place)[1])

    def within(self, start: int, end: int) -> tuple[int, int]:
        """The tokens (first, behind the last) that are made of characters start..end and of no others."""
        places = range(self._count)
        first = bisect_left(places, start, key=self.start)
        return first, max(first, min(bisect_right(places, end, key=self.end), bisect_left(places, end, key=self.start)))

    def closing(self, place: int) -> int | None:
        """The token that comes first at or behind `place`, white space aside; None when it takes in more of what stands before."""
        while place < len(self._text) and self._text[place].isspace():
            place += 1
        token = bisect_right(range(self._count), place, key=self.end)
        return token if token < self._count and not self._text[self.start(token) : place].strip() else None


def mark(spans: Sequence[Span], input_ids: np.ndarray, tokens: Tokens, end_ids: Collection[int]) -> tuple[np.ndarray, int]:
    """(uint8 [T], crossing): 1 on tokens of the spans and on the end-of-turn token directly behind each, only white space between.

    input_ids: int [T]. A token that lies across a border of a span is not all the assistant's, and stays 0; `crossing` counts them.
    """
    mask = np.zeros(len(input_ids), np.uint8)
    crossing = 0
    for span in spans:
        first, last = tokens.within(span.start, span.end)
        closed = span.closed if span.closed is not None else last > first and int(input_ids[last - 1]) in end_ids
        closing = None if closed else tokens.closing(span.end)
        if closing is not None and int(input_ids[closing]) in end_ids:
            last = closing + 1
        mask[first:last] = 1
        crossing += bool(first and tokens.end(first - 1) > span.start) + bool(last < len(tokens) and tokens.start(last) < span.end)
    return mask, crossing
