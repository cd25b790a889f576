"""How good drafts are: accuracy per slot, and how many leading slots of a block are right.

In: which slots are right and which count, [A, S] for the S drafted slots of a block. Out: counts that add up over rows, ranks and steps; numbers only at the
end. Everything is counted per block first and averaged afterwards, never made from products of averages. Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True)
class BlockCounts:
    """Sums over blocks that have at least one slot that counts. Add with +."""

    right_S: torch.Tensor
    """int64 [S]: right slots, in the order of drafting."""
    count_S: torch.Tensor
    """int64 [S]: slots that count."""
    streak_sum: torch.Tensor
    """int64: leading right slots, summed over blocks. A slot that does not count ends the block; it is not a mistake."""
    blocks: torch.Tensor
    """int64: blocks."""
    full_streak_sum: torch.Tensor
    """int64: the same sum over blocks all of whose slots count."""
    full_blocks: torch.Tensor
    """int64: such blocks."""

    def __add__(self, other: BlockCounts) -> BlockCounts:
        return BlockCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @classmethod
    def none(cls, num_slots: int, device: torch.device | None = None) -> BlockCounts:
        """Counts of no block that drafts `num_slots` tokens."""
        slots, one = (torch.zeros(size, dtype=torch.int64, device=device) for size in ((num_slots,), ()))
        return cls(slots, slots, one, one, one, one)


def leading_right(right_AS: torch.Tensor, carries_AS: torch.Tensor) -> torch.Tensor:
    """int64 [A]: right slots of each block before the first that is wrong or does not count."""
    return (right_AS & carries_AS).long().cumprod(1).sum(1)


@dataclass(frozen=True)
class Chain:
    """How a block's acceptance goes on from slot to slot, over blocks from every anchor. Add with +."""

    reached_S: torch.Tensor
    """int64 [S]: blocks in which the slot counts and all slots before it are right."""
    accepted_S: torch.Tensor
    """int64 [S]: of them, those in which it is right too."""

    def __add__(self, other: Chain) -> Chain:
        return Chain(self.reached_S + other.reached_S, self.accepted_S + other.accepted_S)

    @classmethod
    def none(cls, num_slots: int) -> Chain:
        """Of no block."""
        return cls(*(torch.zeros(num_slots, dtype=torch.int64) for _ in range(2)))

    @property
    def conditional(self) -> tuple[float, ...]:
        """P(slot k is accepted | slots 1..k-1 are), for each drafted slot; 0 where none came so far."""
        return tuple(_share(accepted, reached) for accepted, reached in zip(self.accepted_S.tolist(), self.reached_S.tolist()))


def chain(right_AS: torch.Tensor, carries_AS: torch.Tensor) -> Chain:
    """The chain of A blocks. A slot that does not count is not reached: it is no mistake."""
    streak_A1, slot_S = leading_right(right_AS, carries_AS)[:, None], torch.arange(right_AS.shape[1], device=right_AS.device)
    return Chain(((streak_A1 >= slot_S) & carries_AS).sum(0), (streak_A1 > slot_S).sum(0))


def count_blocks(right_AS: torch.Tensor, carries_AS: torch.Tensor) -> BlockCounts:
    """Counts of A blocks; those without any slot that counts (padding) are left out."""
    streak_A, full_A = leading_right(right_AS, carries_AS), carries_AS.all(1)
    return BlockCounts(
        right_S=(right_AS & carries_AS).sum(0),
        count_S=carries_AS.sum(0),
        streak_sum=streak_A.sum(),
        blocks=carries_AS.any(1).sum(),
        full_streak_sum=(streak_A * full_A).sum(),
        full_blocks=full_A.sum(),
    )


@dataclass(frozen=True)
class DraftQuality:
    """What counts come to."""

    accuracy: float
    """Share of right slots."""
    accuracy_per_slot: tuple[float, ...]
    """The same for each drafted slot."""
    streak: float
    """Mean leading right slots of a block; a block cut short by the end of supervision counts with what it has."""
    tau: float
    """streak + 1: with the token that the target adds after each block, as the paper and vLLM count."""
    tau_full: float
    """tau of the blocks all of whose drafted slots count, so that cut blocks do not lower it."""
    blocks: int
    """Blocks counted."""
    full_blocks: int
    """Blocks behind tau_full."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "accuracy_per_slot": list(self.accuracy_per_slot)}


def quality(counts: BlockCounts) -> DraftQuality:
    """The numbers; 0 where nothing was counted (tau: 1)."""
    right, count = counts.right_S.tolist(), counts.count_S.tolist()
    streak = _share(counts.streak_sum.item(), counts.blocks.item())
    return DraftQuality(
        accuracy=_share(sum(right), sum(count)),
        accuracy_per_slot=tuple(_share(r, c) for r, c in zip(right, count)),
        streak=streak,
        tau=streak + 1,
        tau_full=_share(counts.full_streak_sum.item(), counts.full_blocks.item()) + 1,
        blocks=int(counts.blocks),
        full_blocks=int(counts.full_blocks),
    )


@dataclass(frozen=True)
class Walk:
    """What serving a document would count. Add with +."""

    steps: int = 0
    """Drafts: verification passes after the prefill."""
    accepted: int = 0
    """Draft tokens that the target would have accepted."""
    accepted_at: tuple[int, ...] = ()
    """Of them, those of the first, second, ... drafted slot."""

    def __add__(self, other: Walk) -> Walk:
        if not self.accepted_at or not other.accepted_at:
            return Walk(self.steps + other.steps, self.accepted + other.accepted, self.accepted_at or other.accepted_at)
        return Walk(self.steps + other.steps, self.accepted + other.accepted, tuple(a + b for a, b in zip(self.accepted_at, other.accepted_at)))

    @property
    def tau(self) -> float:
        """Mean acceptance length, 1 + accepted / steps, as vLLM reports it."""
        return 1 + _share(self.accepted, self.steps)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Of the steps, those in which each drafted slot was accepted."""
        return tuple(_share(accepted, self.steps) for accepted in self.accepted_at)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Of the steps in which the slot before was accepted, those in which this one was too."""
        return tuple(_share(accepted, before) for accepted, before in zip(self.accepted_at, (self.steps, *self.accepted_at)))

    def to_dict(self) -> dict[str, Any]:
        """For JSON. tau counts the token that the target adds after each block (the bonus); accepted_per_step does not."""
        return {
            "tau": self.tau,
            "accepted_per_step": _share(self.accepted, self.steps),
            "steps": self.steps,
            "accepted": self.accepted,
            "proposed": self.steps * len(self.accepted_at),
            "acceptance_per_slot": list(self.acceptance),
            "conditional_per_slot": list(self.conditional),
        }


def walk(anchor_rows: list[int], streaks: list[int], num_slots: int) -> Walk:
    """Simulate serving one document from its anchors (ascending) and the leading right slots of each.

    Starts at the first anchor, which the prefill's own token is; accepts the leading right slots; the target adds the token
    after them, and that is the next anchor: a + streak + 1. When it is no anchor, its turn is over (nothing supervised
    follows it, or it is the turn's last token), and the walk goes on at the next turn's first anchor.

    vLLM counts all proposed tokens at every step, and so does this. At a turn's end only tokens up to the end are counted
    as accepted; vLLM counts drafts past it as well when they match, so this is, in the last step of a turn, a lower bound.
    """
    accepted = [streak for streak, is_step in zip(streaks, walk_steps(anchor_rows, streaks)) if is_step]
    return Walk(len(accepted), sum(accepted), tuple(sum(streak > slot for streak in accepted) for slot in range(num_slots)))


def walk_steps(anchor_rows: list[int], streaks: list[int]) -> list[bool]:
    """From which of one document's anchors (ascending) the walk drafts."""
    steps, upcoming = [], 0
    for row, streak in zip(anchor_rows, streaks):
        steps.append(row >= upcoming)
        if steps[-1]:
            upcoming = row + streak + 1
    return steps


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
