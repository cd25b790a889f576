"""What became of every row: the counts while a run goes on, their check, and the summary of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..common.errors import RunFailed
from ..common.spec import CacheSpec
from .config import ExtractConfig
from .engine import Outcome, WriterCounts
from .fidelity import FidelityMonitor
from .prepare import Passed, Prepared
from .rejects import Reject, count_reasons
from .share import Share


@dataclass(frozen=True)
class ExtractSummary:
    """What a run did."""

    rows: int
    """Rows read."""
    more_turns: int
    """Samples and rejects above one a row: the turns that `--turns each` made samples of their own."""
    samples: int
    """Stored by this run."""
    already_stored: int
    """Samples that an earlier run had stored."""
    rejects: int
    reject_reasons: dict[str, int]
    shapes: dict[str, dict[str, int]]
    """Rows of each source by the shape that was found in them."""
    notes: dict[str, int]
    """Samples by what happened to them that was no reason to reject them."""
    tokens: int
    """Rows of states stored by this run."""
    supervised_tokens: int
    """Of them, those that may be learned from; a generated last token counts."""
    stored_bytes: int
    """Size of the parts that this run published."""
    bytes_per_token: float | None
    ratio_to_raw: float | None
    """Stored bytes over plain bfloat16."""
    parts: int
    """Published by this run."""
    seconds: float
    """Of the engine's work, its start not included."""
    tokens_per_second: float | None
    generated_tokens: int
    """Written by the target in this run, for samples and rejects, those of answers that became history included."""
    fidelity_samples: int
    fidelity_agreement: float | None
    """Share of the checked samples whose stored state predicts the engine's own next token; None when not checked."""
    left_to_others: int = 0
    """Samples that are other ranks' to store."""
    cache: str = ""
    layer_ids: tuple[int, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """As a JSON document."""
        return asdict(self)

    def to_text(self) -> str:
        """For people."""
        rows = f"{self.rows:,} rows" + (f" and {self.more_turns:,} more turns" if self.more_turns else "")
        others = f" + {self.left_to_others:,} of other ranks" if self.left_to_others else ""
        lines = [f"{rows} = {self.samples:,} samples + {self.rejects:,} rejects + {self.already_stored:,} already stored{others}"]
        lines += [f"  {source}: {', '.join(f'{count:,} {shape}' for shape, count in found.items())}" for source, found in self.shapes.items()]
        lines += [f"  rejected {count:,} x {reason}" for reason, count in self.reject_reasons.items()]
        lines += [f"  noted    {count:,} x {note}" for note, count in self.notes.items()]
        if self.samples:
            lines.append(
                f"{self.tokens:,} tokens ({self.supervised_tokens:,} supervised) in {self.seconds:.0f} s, {self.tokens_per_second or 0:.0f} tokens/s"
            )
            lines.append(
                f"{self.stored_bytes:,} bytes in {self.parts} parts: {self.bytes_per_token or 0:,.0f} a token, {self.ratio_to_raw or 0:.3f} of raw bfloat16"
            )
        if self.generated_tokens:
            lines.append(f"{self.generated_tokens:,} tokens generated, {self.generated_tokens / (self.seconds or 1):,.0f} tokens/s")
        if self.fidelity_agreement is not None:
            lines.append(f"teacher fidelity {self.fidelity_agreement:.2%} of {self.fidelity_samples:,} samples")
        return "\n".join([*lines, f"cache {self.cache}, layers {', '.join(map(str, self.layer_ids))}"])


class Account:
    """Counts what became of every row."""

    def __init__(self, prepared: Prepared, already_stored: int, share: Share) -> None:
        self.share = share
        self.rows, self.more_turns, self.already_stored = prepared.rows, prepared.more_turns, already_stored
        self.passed: Passed = prepared.passed
        self.shapes, self.notes = prepared.shapes, prepared.notes
        self.rejects: list[Reject] = list(prepared.rejects)
        self.samples = self.tokens = self.supervised_tokens = self.generated_tokens = 0
        self.counts = WriterCounts()
        self.seconds = 0.0
        self.monitor: FidelityMonitor | None = None

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """These documents are done."""
        for outcome in outcomes:
            document = outcome.document
            self.generated_tokens += outcome.generated_tokens
            if outcome.reject is not None:
                self.rejects.append(Reject(document.source, document.source_row, outcome.reject))
            else:
                self._count(outcome, 1)

    def take_back(self, outcomes: Iterable[Outcome]) -> None:
        """These were stored and are not published; they will be done again. What was generated for them was generated."""
        for outcome in outcomes:
            self._count(outcome, -1)

    def _count(self, outcome: Outcome, sign: int) -> None:
        self.samples += sign
        self.tokens += sign * outcome.tokens
        self.supervised_tokens += sign * outcome.supervised_tokens
        for note in outcome.notes:
            self.notes[note] += sign

    def check(self) -> None:
        """Every row has one fate, and what was accepted is what was published."""
        fates = self.samples + len(self.rejects) + self.already_stored + self.share.left_to_others
        if self.rows + self.more_turns != fates or (self.samples, self.tokens) != (
            self.counts.samples,
            self.counts.tokens,
        ):
            raise RunFailed(
                "the accounts do not add up",
                place="extract",
                found=f"{self.rows} rows and {self.more_turns} more turns; {self.samples} samples ({self.counts.samples} published), "
                f"{len(self.rejects)} rejects, {self.already_stored} already stored, {self.share.left_to_others} of other ranks",
                expected="rows and more turns = samples + rejects + already stored + those of other ranks",
                fix="run `dflash verify` on the cache and report this",
            )

    def summary(self, config: ExtractConfig, existing: CacheSpec) -> ExtractSummary:
        self.check()
        monitor, tokens, stored = self.monitor, self.tokens, self.counts.stored_bytes
        return ExtractSummary(
            rows=self.rows,
            more_turns=self.more_turns,
            samples=self.samples,
            already_stored=self.already_stored,
            rejects=len(self.rejects),
            reject_reasons=count_reasons(self.rejects),
            shapes=by_source(self.shapes),
            notes={note: count for note, count in self.notes.most_common() if count},
            tokens=tokens,
            supervised_tokens=self.supervised_tokens,
            stored_bytes=stored,
            bytes_per_token=stored / tokens if tokens else None,
            ratio_to_raw=stored / (tokens * existing.raw_bytes_per_token) if tokens else None,
            parts=self.counts.parts,
            seconds=self.seconds,
            tokens_per_second=tokens / self.seconds if tokens and self.seconds else None,
            generated_tokens=self.generated_tokens,
            fidelity_samples=monitor.samples if monitor else 0,
            fidelity_agreement=monitor.agreement if monitor else None,
            left_to_others=self.share.left_to_others,
            cache=str(config.cache),
            layer_ids=existing.layer_ids,
        )


def by_source(shapes: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """{source: {shape: rows}}."""
    found: dict[str, dict[str, int]] = {}
    for (source, shape), count in shapes.items():
        found.setdefault(source, {})[shape] = count
    return found
