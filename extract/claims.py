"""Claims: which tokens of a history are exactly those that the target wrote.

In: a rendered question, and the earlier answers as the target wrote them. Out: a mask. Templates rewrite the past (they trim, leave
thoughts out, end a turn with another token) and text does not always give the same tokens again. An answer is claimed when all of its
tokens stand in the history as they were written, else not at all; the token that ended it is claimed where that very token follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .rejects import RowRejected
from .spans import Render, Tokens, locate_turns


@dataclass(frozen=True, eq=False)
class Answer:
    """What the target wrote in one turn."""

    prompt_ids: np.ndarray
    """int32 [T]: what it was asked."""
    ids: np.ndarray
    """int32 [N]; the last one ended it."""
    text: str
    """As it stands in the messages of the turns that follow."""


def claim(
    text: str,
    input_ids: np.ndarray,
    tokens: Tokens,
    messages: list[dict[str, Any]],
    answers: Sequence[Answer],
    places: Sequence[int],
    render: Render,
    generation_prompt: str,
) -> tuple[np.ndarray, int]:
    """(uint8 [T], claimed): 1 on the tokens of `answers`; how many answers were claimed.

    text, input_ids (int32 [T]), tokens: the rendered `messages` and a generation prompt behind them. places: where in the messages the
    answers stand.
    """
    mask = np.zeros(len(input_ids), np.uint8)
    claimed, elsewhere = 0, []
    for answer, place in zip(answers, places, strict=True):
        first, written = len(answer.prompt_ids), answer.ids[:-1]
        fed = np.concatenate([answer.prompt_ids, written])
        if np.array_equal(input_ids[: len(fed)], fed):  # the past is what it was
            _mark(mask, input_ids, first, len(fed), answer)
            claimed += 1
        else:
            elsewhere.append((answer, place))
    if not elsewhere:
        return mask, claimed
    try:
        plain = render(messages)
        spans = locate_turns(plain, messages, [place for _, place in elsewhere], render, generation_prompt) if text.startswith(plain) else []
    except RowRejected:
        spans = []
    for (answer, _), span in zip(elsewhere, spans, strict=False):
        first, last = tokens.within(span.start, span.end)
        if np.array_equal(input_ids[first:last], answer.ids[:-1]) or (span.closed and np.array_equal(input_ids[first:last], answer.ids)):
            _mark(mask, input_ids, first, last, answer)
            claimed += 1
    return mask, claimed


def _mark(mask: np.ndarray, input_ids: np.ndarray, first: int, last: int, answer: Answer) -> None:
    """Claim first..last, and the token behind where it is the one that ended the answer."""
    behind = first + len(answer.ids) - 1
    mask[first:last] = 1
    mask[behind : behind + 1] |= np.uint8(behind < len(input_ids) and input_ids[behind] == answer.ids[-1])


def answer_text(tokenizer: Any, prompt_ids: np.ndarray, answer_ids: np.ndarray) -> str:
    """What a server answers: the tokens decoded behind the end of the prompt, special tokens left out, no spaces cleaned up."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    before, prefix = prompt_ids.tolist(), ""
    for size in range(4, 24):  # far enough back for a whole character, as vLLM goes
        before = prompt_ids[-size:].tolist()
        prefix = decode(before)
        if "\N{REPLACEMENT CHARACTER}" not in prefix:
            break
    whole = decode([*before, *answer_ids.tolist()])
    return whole[len(prefix) :] if whole.startswith(prefix) else decode(answer_ids.tolist())
