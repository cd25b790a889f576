"""EvalResult: what an offline evaluation found, as numbers, as JSON and as text.

In: a Tally. Out: the result; acceptance lengths first, each with its confidence interval. Owns names and layout, measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.bootstrap import LEVEL, Interval, intervals
from .config import EvalConfig
from .metrics import DraftQuality, Walk, quality
from .tally import PER_DOCUMENT, PER_WAY, Tally

BAR, EIGHTHS = 24, " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Certainty:
    """Confidence intervals, from resampling documents; None where there are too few."""

    tau_walk: Interval | None
    """Of the acceptance length as served."""
    tau: Interval | None
    """Of that over every anchor."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"tau_walk": self.tau_walk and list(self.tau_walk), "tau": self.tau and list(self.tau)}


@dataclass(frozen=True)
class EvalResult:
    """What a drafter reaches."""

    tau_walk: float
    """Mean acceptance length of simulated serving (1 + accepted / steps): the number to compare with a served one."""
    walk: Walk
    """Its steps and accepted tokens, per slot too."""
    walk_by_source: dict[str, Walk]
    """The same for each dataset."""
    quality: DraftQuality
    """Over every anchor, against the target's most likely tokens."""
    conditional_per_slot: tuple[float, ...]
    """Over every anchor: how often a slot is right when all before it are."""
    data_tau_walk: float
    """The walk against the text's own tokens."""
    data_quality: DraftQuality
    """Over every anchor, against the text's own tokens."""
    by_source: dict[str, dict[str, Any]]
    """Each dataset's numbers (Group.to_dict)."""
    by_position: tuple[dict[str, Any], ...]
    """The same by the anchor's position in its answer: from, to (None: without end) and Group.to_dict."""
    by_temperature: tuple[dict[str, Any], ...]
    """Expected acceptance under sampling (SampledCounts.to_dict, with an interval of each tau)."""
    certainty: Certainty
    """Over all documents."""
    certainty_by_source: dict[str, Certainty]
    """From each dataset's own documents."""
    resamples: int
    """Of the bootstrap."""
    documents: int
    """Documents evaluated."""
    documents_without_anchor: int
    """Documents passed over, because nothing in them can be drafted."""
    block_size: int
    """B."""
    drafter: str
    """Where it was read."""
    fingerprints: tuple[str, ...]
    """Of the caches' settings."""
    documents_digest: str
    """Of the documents evaluated: results compare only when these are equal."""
    documents_trained_on: int | None
    """Of the documents, those that the drafter's run had trained on; None when that is not known."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; acceptance lengths first."""
        by_source = {source: {**found, "confidence": self.certainty_by_source[source].to_dict()} for source, found in self.by_source.items()}
        return {
            "tau_walk": self.tau_walk,
            "data_tau_walk": self.data_tau_walk,
            "confidence": {"level": LEVEL, "over": "documents", "resamples": self.resamples, **self.certainty.to_dict()},
            "walk": self.walk.to_dict(),
            "walk_by_source": {source: walk.to_dict() for source, walk in sorted(self.walk_by_source.items())},
            "quality": self.quality.to_dict(),
            "conditional_per_slot": list(self.conditional_per_slot),
            "data_quality": self.data_quality.to_dict(),
            "by_source": by_source,
            "by_position": [dict(found) for found in self.by_position],
            "by_temperature": [dict(found) for found in self.by_temperature],
            "documents": self.documents,
            "documents_without_anchor": self.documents_without_anchor,
            "block_size": self.block_size,
            "drafter": self.drafter,
            "cache_fingerprints": list(self.fingerprints),
            "documents_digest": self.documents_digest,
            "documents_trained_on": self.documents_trained_on,
        }

    def to_text(self) -> str:
        """For people."""
        found, walked = self.quality, self.walk
        lines = [
            f"acceptance length  {self.tau_walk:.3f}{_interval(self.certainty.tau_walk)}  simulated serving, greedy, bonus token included",
            f"  without bonus    {walked.tau - 1:.3f}  ({walked.accepted:,} accepted in {walked.steps:,} steps)",
            f"every anchor       tau {found.tau:.3f}{_interval(self.certainty.tau)}, of whole blocks {found.tau_full:.3f}; {found.blocks:,} blocks",
            f"against the text   acceptance length {self.data_tau_walk:.3f}, every anchor {self.data_quality.tau:.3f}",
            f"documents          {self.documents:,}, of which {self.documents_without_anchor:,} have nothing to draft",
        ]
        if self.documents_trained_on:
            lines.append(f"WARNING            {self.documents_trained_on:,} of the documents were trained on: this is no held-out acceptance length")
        lines += [
            "",
            "slot   served   accuracy   conditional   (served: of the simulated steps; accuracy: of every anchor; conditional: after right slots only)",
        ]
        rows = zip(walked.acceptance or (0.0,) * len(found.accuracy_per_slot), found.accuracy_per_slot, self.conditional_per_slot)
        lines += [f"{k:4}    {s:.3f}      {a:.3f}     {c:.3f}  {bar(c)}" for k, (s, a, c) in enumerate(rows, self.first_slot)]
        if len(self.by_source) > 1:
            lines += ["", "by source"]
            for source, values in sorted(self.by_source.items()):
                lines.append(_line(values, f"{values['documents']:,} documents", source, self.certainty_by_source[source].tau_walk, self.block_size))
        lines += ["", "by position in the answer"]
        for values in self.by_position:
            if values["blocks"]:
                name = f"{values['from']}-{values['to']}" if values["to"] is not None else f"{values['from']}+"
                lines.append(_line(values, f"{values['steps']:,} steps", name, None, self.block_size))
        if self.by_temperature:
            lines += ["", "expected under sampling (along the text's own tokens)"]
            for values in self.by_temperature:
                name = f"T={values['temperature']:g}, draft {values['drafting']}"
                lines.append(_line(values, f"every anchor {values['tau']:.3f}", name, values["confidence"]["tau_walk"], self.block_size))
        return "\n".join(lines)

    @property
    def first_slot(self) -> int:
        """Number of the first drafted slot in its block."""
        return self.block_size - len(self.quality.accuracy_per_slot)


def report(
    tally: Tally, config: EvalConfig, drafter: str = "", fingerprints: tuple[str, ...] = (), digest: str = "", trained_on: int | None = None
) -> EvalResult:
    """The numbers of what was added up. Intervals are from whole documents, seeded."""
    per_DX, sources = tally.per_document()
    source_D = np.array(sources)
    by_temperature = []
    for number, (way, counts) in enumerate(zip(tally.ways, tally.sampled)):
        at = len(PER_DOCUMENT) + PER_WAY * number
        by_temperature.append({**counts.to_dict(way), "confidence": _certainty(per_DX, config, (at, at + 1, at + 2)).to_dict()})
    bounds = (0, *tally.bounds)
    by_position = [
        {"from": start, "to": end - 1 if end is not None else None, **group.to_dict()}
        for start, end, group in zip(bounds, (*tally.bounds, None), tally.by_position)
    ]
    for position in by_position:
        del position["documents"]  # of all of them
    return EvalResult(
        tau_walk=tally.walk.tau,
        walk=tally.walk,
        walk_by_source={source: group.walk for source, group in tally.by_source.items() if group.walk.steps},
        quality=tally.whole.quality,
        conditional_per_slot=tally.whole.chain.conditional,
        data_tau_walk=tally.data.walk.tau,
        data_quality=quality(tally.data.counts),
        by_source={source: group.to_dict() for source, group in sorted(tally.by_source.items()) if group.documents},
        by_position=tuple(by_position),
        by_temperature=tuple(by_temperature),
        certainty=_certainty(per_DX, config),
        certainty_by_source={source: _certainty(per_DX[source_D == source], config) for source in tally.by_source},
        resamples=config.resamples,
        documents=tally.documents,
        documents_without_anchor=tally.without,
        block_size=tally.block_size,
        drafter=drafter,
        fingerprints=fingerprints,
        documents_digest=digest,
        documents_trained_on=trained_on,
    )


def _certainty(per_DX: np.ndarray, config: EvalConfig, columns: tuple[int, int, int] = (0, 1, 3)) -> Certainty:
    """columns: of steps, accepted tokens of the walk, and accepted tokens from every anchor."""
    steps, accepted, lengths = columns
    above, below = per_DX[:, [accepted, lengths]], per_DX[:, [steps, PER_DOCUMENT.index("blocks")]]
    return Certainty(*intervals(above, below, resamples=config.resamples, seed=config.seed, offset=1.0))


def bar(share: float, width: int = BAR) -> str:
    """A bar of blocks, in eighths of a character; `share` of `width`."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return EIGHTHS[-1] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def _interval(found: Sequence[float] | None) -> str:
    return f" [{found[0]:.3f}, {found[1]:.3f}]" if found is not None else ""


def _line(values: dict[str, Any], note: str, name: str, interval: Sequence[float] | None, block_size: int) -> str:
    tau = values["tau_walk"]
    return f"  {name:24} {tau:.3f}{_interval(interval)}  {bar((tau - 1) / (block_size - 1), 16):16}  {note}"
