"""What the doctor found, as records: each way's acceptance length, where two ways part, and which changes make them agree.

In: numbers. Out: text for people and a dictionary for JSON. Computes nothing but sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .gap import Counts, Gap, tau, tau_interval

TITLES = {"trainer": "the trainer's step", "folder": "the folder, read plainly", "engine": "the engine"}
"""Of the ways; another reading of the folder is called just that."""
MOST_LISTED = 4


@dataclass(frozen=True)
class Way:
    """One way of drafting, over all documents."""

    name: str
    """trainer, folder or engine."""
    place: str
    """Where its weights came from."""
    documents: int
    tau: float
    low: float
    high: float
    """95 % of the resampled documents lie between them."""
    steps: int
    accepted: int
    agreement: float | None
    """Share of the trainer's drafted tokens that it drafts too; None when it cannot be known."""

    @classmethod
    def of(cls, name: str, place: str, counts: Sequence[Counts], agreement: float | None) -> Way:
        """From the documents' walks."""
        steps, accepted = sum(of.steps for of in counts), sum(of.accepted for of in counts)
        return cls(name, place, len(counts), tau(counts), *tau_interval(counts), steps, accepted, agreement)


@dataclass(frozen=True)
class Cause:
    """One change that brings two ways nearer."""

    change: str
    fix: str
    before: float
    """How well the ways fitted without it; higher is better, the scale is the search's own."""
    after: float
    same_effect: tuple[str, ...]
    """Other changes that do just as well on these documents."""


@dataclass(frozen=True)
class Parting:
    """Two ways compared."""

    one: str
    other: str
    gap: Gap | None
    """The length of `other` minus that of `one`; None when one of them gave none."""
    parts: bool
    agreement: float | None = None
    """Share of `one`'s drafted tokens that `other` drafts too."""
    causes: tuple[Cause, ...] = ()
    explained: bool = False
    """With the causes undone nothing is left but noise."""
    left: Gap | None = None
    """The difference with the causes undone."""
    agreement_left: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All of it."""

    ways: tuple[Way, ...]
    partings: tuple[Parting, ...]
    differences: tuple[str, ...]
    """In which the folder is not the run, whether or not it shows on these documents."""
    documents: int
    differing_answers: int
    """Documents that the engine continued otherwise than the cache; they are compared up to there."""
    notes: tuple[str, ...]
    untried: tuple[str, ...]
    """Hypotheses that this cache cannot test."""

    @property
    def ok(self) -> bool:
        """All ways agree, and the folder is the run."""
        return not self.differences and not any(parting.parts for parting in self.partings)

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {"agree": self.ok, **asdict(self)}

    def to_text(self) -> str:
        """For people."""
        lines = [f"{'way':<26}{'tau':>8}   {'95 % interval':<16}{'accepted / steps':>20}   {'tokens as trained':>17}   documents"]
        for way in self.ways:
            share = "" if way.agreement is None else f"{way.agreement:.1%}"
            walked = f"{way.accepted:,} / {way.steps:,}"
            lines.append(
                f"{TITLES[way.name]:<26}{way.tau:>8.3f}   {f'{way.low:.3f} .. {way.high:.3f}':<16}{walked:>20}   {share:>17}   {way.documents:>9,}"
            )
        if self.differing_answers:
            lines.append(f"{self.differing_answers:,} answers of the engine leave the cached text; all rows stop where they do")
        lines += [""] + [line for parting in self.partings for line in _said(parting)]
        causes = {cause.change for parting in self.partings for cause in parting.causes}
        lines += [f"DIFFERS from the run, without effect on these documents: {name}" for name in self.differences if name not in causes]
        lines += [f"note: {note}" for note in self.notes]
        if not self.ok:
            lines += [f"cannot be tried from this cache: {reason}" for reason in self.untried]
        return "\n".join(lines)


def _said(parting: Parting) -> list[str]:
    one, other = (TITLES.get(name, name) for name in (parting.one, parting.other))
    if not parting.parts:
        assert parting.gap is not None
        return [f"agree: {one} and {other}, difference {parting.gap.text}{_alike(parting.agreement)}"]
    if parting.gap is None:
        return [f"PART: {one} and {other}: nothing was served"]
    lines = [f"PART: {one} and {other}, difference {parting.gap.text}{_alike(parting.agreement)}"]
    together = "diagnosis" if len(parting.causes) < 2 else "diagnosis, together"
    for cause in parting.causes:
        lines.append(f"  {together}: {cause.change}")
        lines.append(f"  fix: {cause.fix}")
        if cause.same_effect:
            more = f" and {len(cause.same_effect) - MOST_LISTED} more" if len(cause.same_effect) > MOST_LISTED else ""
            lines.append(f"    on these documents the same comes of: {'; '.join(cause.same_effect[:MOST_LISTED])}{more}")
    if parting.causes and parting.left is not None:
        rest = "" if parting.explained else ": not all of it"
        lines.append(f"  with that changed the difference is {parting.left.text}{_alike(parting.agreement_left)}{rest}")
    if not parting.causes:
        lines.append("  no single known convention explains it: compare versions of the engine, types of the products and the target's weights")
    return lines


def _alike(agreement: float | None) -> str:
    return "" if agreement is None else f", {agreement:.1%} of the drafted tokens alike"
