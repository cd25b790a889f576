"""Acceptance under sampling: what speculative sampling would accept at a temperature, without drawing anything.

In: the logits of target (q) and drafter (p) for the same slots. Out: the probability that each drafted token is accepted, and
from those the expected accepted length of a block and of a whole document. Pure functions.

Speculative sampling accepts a token x drawn from p with probability min(1, q(x)/p(x)), in the mean sum(min(p, q)), both after
the temperature (Leviathan et al., arXiv 2211.17192). Two ways to draft are told apart:

    sampled   the draft is drawn from p at the same temperature: sum(min(p, q))
    greedy    the draft is the drafter's most likely token, which is how vLLM drafts unless told otherwise
              (`draft_sample_method`): its p is 1 there, so the acceptance is q of that token

What is approximate: q of slot k is the target's distribution after the *text's own* tokens up to there, whereas in serving it
would follow the tokens that were just accepted. p needs no such excuse: a block is drafted at once, from its anchor alone. Given
that path, the slots of a block are accepted independently, so P(at least k accepted) is the product of the first k acceptances
and the expected length their sum over k. It is made per block and averaged afterwards, never from averages. On text that the
target itself sampled at that temperature the approximation is a fair sample of what would be seen; on greedily generated text
it looks along the target's most likely path, where both models are surer, and so tends to come out high.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch

from .draft_head import DraftHead

Drafting = Literal["sampled", "greedy"]


@dataclass(frozen=True)
class Way:
    """One way to sample."""

    temperature: float
    drafting: Drafting


def ways(temperatures: Sequence[float]) -> tuple[Way, ...]:
    """For each temperature over 0, ascending and once, both ways to draft. 0 is greedy, which is counted exactly elsewhere."""
    drafting: tuple[Drafting, ...] = ("sampled", "greedy")
    return tuple(Way(temperature, way) for temperature in sorted(set(temperatures) - {0.0}) for way in drafting)


def slot_acceptance(
    temperatures: Sequence[float], draft_mD: torch.Tensor, target_uV: torch.Tensor, where_m: torch.Tensor, head: DraftHead
) -> torch.Tensor:
    """float64 [U, m] on the CPU: of m slots, the acceptance in each of the U `ways` of `temperatures` (all over 0, ascending).

    draft_mD: the drafter's logits over its D tokens. target_uV: the target's for u rows; where_m: the row of each slot.
    """
    best_m, found = draft_mD.max(-1).indices, []
    for temperature in temperatures:
        q_uD = head.kept_logits(torch.softmax(target_uV.float() / temperature, -1))  # of what is left out nothing is ever drafted
        q_mD, p_mD = q_uD[where_m], torch.softmax(draft_mD.float() / temperature, -1)
        found += [torch.minimum(p_mD, q_mD).sum(-1), q_mD.gather(1, best_m[:, None]).squeeze(1)]
    return torch.stack(found).double().cpu().clamp(0, 1)  # float32 sums of probabilities pass 1 by a rounding


def prefix_products(accept_AS: np.ndarray) -> np.ndarray:
    """[A, S]: P(slots 1..k are all accepted). accept_AS: 0 where a slot does not count, which ends the block."""
    return np.cumprod(accept_AS, 1)


def expected_walk(rows_A: np.ndarray, accept_AS: np.ndarray) -> np.ndarray:
    """float64 [A]: how often serving one document is expected to draft from each anchor (ascending rows).

    The simulated walk with probabilities instead of a yes or no: from anchor a with probability P(exactly k accepted) to the
    first anchor at or after a + k + 1. With acceptances of 0 and 1 it is the greedy walk.
    """
    reach_AS = prefix_products(accept_AS)
    exactly_AN = np.concatenate([np.ones((len(reach_AS), 1)), reach_AS], 1) - np.concatenate([reach_AS, np.zeros((len(reach_AS), 1))], 1)
    next_AN = np.searchsorted(rows_A, rows_A[:, None] + np.arange(1, exactly_AN.shape[1] + 1))
    visits = np.zeros(len(rows_A) + 1)  # the last one is the end
    visits[0] = 1.0
    for anchor in range(len(rows_A)):
        np.add.at(visits, next_AN[anchor], visits[anchor] * exactly_AN[anchor])
    return visits[:-1]


@dataclass(frozen=True)
class SampledCounts:
    """Sums over blocks, for one way to sample. Add with +."""

    steps: float = 0.0
    """Expected drafts of the walks."""
    accepted: float = 0.0
    """Expected accepted tokens of them."""
    blocks: int = 0
    """Blocks, one from every anchor."""
    length_sum: float = 0.0
    """Their expected accepted tokens."""
    full_blocks: int = 0
    """Blocks all of whose slots count."""
    full_length_sum: float = 0.0
    """Their expected accepted tokens."""
    accept_sum_S: tuple[float, ...] = ()
    """Acceptances of each slot."""
    count_S: tuple[int, ...] = ()
    """Slots that count."""

    def __add__(self, other: SampledCounts) -> SampledCounts:
        if not self.count_S or not other.count_S:
            return other if not self.count_S else self

        def both(name: str) -> Any:
            ours, theirs = getattr(self, name), getattr(other, name)
            return tuple(a + b for a, b in zip(ours, theirs)) if isinstance(ours, tuple) else ours + theirs

        return SampledCounts(**{field.name: both(field.name) for field in fields(self)})

    def to_dict(self, way: Way) -> dict[str, Any]:
        """For JSON; the same names as for greedy decoding."""
        return {
            "temperature": way.temperature,
            "drafting": way.drafting,
            "tau_walk": 1 + _share(self.accepted, self.steps),
            "tau": 1 + _share(self.length_sum, self.blocks),
            "tau_full": 1 + _share(self.full_length_sum, self.full_blocks),
            "acceptance_per_slot": [_share(total, count) for total, count in zip(self.accept_sum_S, self.count_S)],
        }


def count_document(rows_A: np.ndarray, accept_AS: np.ndarray, carries_AS: np.ndarray) -> SampledCounts:
    """Counts of one document's blocks, from every anchor (ascending rows)."""
    accept_AS = np.where(carries_AS, accept_AS, 0.0)
    length_A, full_A = prefix_products(accept_AS).sum(1), carries_AS.all(1)
    visits_A = expected_walk(rows_A, accept_AS)
    return SampledCounts(
        steps=float(visits_A.sum()),
        accepted=float(visits_A @ length_A),
        blocks=len(rows_A),
        length_sum=float(length_A.sum()),
        full_blocks=int(full_A.sum()),
        full_length_sum=float(length_A[full_A].sum()),
        accept_sum_S=tuple(accept_AS.sum(0).tolist()),
        count_S=tuple(carries_AS.sum(0).tolist()),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
