"""Near ties: whether two servers' answers differ only where the target itself could hardly decide.

In: two answers to the same prompt, and the target's log-probabilities where they first differ. Out: what became of each
difference. Greedy speculative decoding changes no answer in exact arithmetic. In bfloat16 it may: a verification pass multiplies
several rows at once where plain decoding multiplies one, sums come in another order, and the most likely token changes where
two are almost equally likely. A difference is a near tie when the two tokens' log-probabilities lie within `near_tie_nats`.
Only the first difference of an answer is looked at: behind it the two are about different texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """The first differing token of a prompt's answers."""

    prompt: int
    """Number of the prompt, from 0."""
    place: int
    """The differing token's place in the answer, from 0."""
    without: int | None
    """Token without the drafter; None when that answer had ended."""
    with_drafter: int | None
    """Token with it; None when that answer had ended."""
    margin_nats: float | None = None
    """How far the target's log-probabilities of the two lie apart; None when they are not known."""

    def is_near_tie(self, near_tie_nats: float) -> bool:
        """False too when the margin is not known."""
        return self.margin_nats is not None and self.margin_nats <= near_tie_nats


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ; the shorter one's length when it is a beginning of the other."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def differences(without: Sequence[Sequence[int]], with_drafter: Sequence[Sequence[int]]) -> list[Difference]:
    """The first difference of every prompt whose answers differ."""
    found = []
    for prompt, (one, other) in enumerate(zip(without, with_drafter, strict=True)):
        if (place := first_difference(one, other)) is not None:
            found.append(Difference(prompt, place, *(answer[place] if place < len(answer) else None for answer in (one, other))))
    return found


def margin(difference: Difference, log_probabilities: Mapping[int, float]) -> float | None:
    """|log p - log p'| of the two tokens; None when one is not among the `log_probabilities`."""
    pair = [log_probabilities.get(token) for token in (difference.without, difference.with_drafter) if token is not None]
    known = [value for value in pair if value is not None]
    return abs(known[0] - known[1]) if len(known) == 2 else None
