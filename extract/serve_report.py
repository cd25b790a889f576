"""ServedResult: what serving with a drafter gave, compared with serving without, as numbers, as JSON and as text.

In: what the servers counted. Out: acceptance length first, with its confidence interval over prompts. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..common.bootstrap import LEVEL, Interval, intervals
from .config import ServeConfig
from .serve_worker import Served
from .ties import Difference

NOT_TOLD = "this vLLM does not tell each request's acceptance"


@dataclass(frozen=True)
class SourceResult:
    """Acceptance on one source's prompts."""

    prompts: int
    tau: float | None
    """None when nothing was drafted."""
    interval: Interval | None
    """Of tau, over its prompts."""
    drafts: int
    accepted_tokens: int


@dataclass(frozen=True)
class ServedResult:
    """What serving with the drafter gave."""

    prompts: int
    rejects: dict[str, int]
    """Rows that are no prompts, by reason."""
    notes: dict[str, int]
    """What else happened to prompts that were served, and how often."""
    temperature: float
    num_speculative_tokens: int
    drafts: int
    """Times that a block was proposed."""
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]
    """Of the drafts, those in which the token at this place was accepted."""
    conditional_per_position: list[float]
    """Of the drafts in which the place before was accepted, those in which this one was too."""
    tau: float | None
    """Mean tokens won per verification: 1 + accepted_tokens / drafts; None when nothing was drafted."""
    tau_interval: Interval | None
    """Its confidence interval, from resampling prompts; None when vLLM does not tell each request's acceptance."""
    by_source: dict[str, SourceResult] | None
    """By what --data named; None when vLLM does not tell each request's acceptance."""
    output_tokens_without: int | None
    """None, as everything about the server without a drafter, when there was none."""
    output_tokens_with: int
    tokens_per_second_without: float | None
    tokens_per_second_with: float
    speed_up: float | None
    differing_outputs: int | None
    """Prompts whose answers differ; None when they were not compared (sampling, or no server without a drafter)."""
    near_ties: int | None
    """Of them, those whose two tokens are about equally likely for the target."""
    unexplained: int | None
    """The others."""
    near_tie_nats: float
    """How far apart two log-probabilities of a near tie may lie."""
    first_differences: list[tuple[int, int]]
    """(prompt, first differing token) of each."""
    differences: list[Difference]
    """The same with the tokens and their margin."""
    inconsistencies: list[str]
    """Counters of vLLM that contradict each other; empty when all is well."""

    def to_dict(self) -> dict[str, Any]:
        """As a JSON document."""
        return {**asdict(self), "confidence_level": LEVEL}

    def to_text(self) -> str:
        """For people."""
        counted = f"({self.accepted_tokens:,} accepted of {self.draft_tokens:,} in {self.drafts:,} drafts; bonus token included)"
        lines = ["acceptance length  nothing was drafted"]
        if self.tau is not None:
            lines = [f"acceptance length  {self.tau:.3f}{_interval(self.tau_interval)}  {counted}"]
            if self.by_source is None:
                lines.append(f"  no interval, and none by source: {NOT_TOLD}")
            lines.append(f"accepted by place  {'  '.join(f'{accepted / self.drafts:.3f}' for accepted in self.accepted_per_position)}")
            lines.append(f"  after the before {'  '.join(f'{share:.3f}' for share in self.conditional_per_position)}")
        if self.by_source is not None and len(self.by_source) > 1:
            lines += [
                f"  {source}: {found.tau:.3f}{_interval(found.interval)} ({found.prompts:,} prompts, {found.drafts:,} drafts)"
                if found.tau is not None
                else f"  {source}: nothing was drafted ({found.prompts:,} prompts)"
                for source, found in self.by_source.items()
            ]
        if self.speed_up is None:
            lines.append(f"tokens/s           {self.tokens_per_second_with:.1f} with the drafter")
        else:
            speeds = f"{self.tokens_per_second_without:.1f} without, {self.tokens_per_second_with:.1f} with the drafter"
            lines.append(f"tokens/s           {speeds}: {self.speed_up:.2f} times")
        lines.append(f"prompts            {self.prompts:,}{self._compared()}")
        if self.unexplained:
            lines.append(f"  WARNING: {self.unexplained:,} answers differ where the target was not in doubt; suspect the engine")
            lines += [
                f"    prompt {each.prompt}, token {each.place}: {each.without} without, {each.with_drafter} with; "
                + (f"{each.margin_nats:.3f} nats apart" if each.margin_nats is not None else "too far apart to tell")
                for each in [each for each in self.differences if not each.is_near_tie(self.near_tie_nats)][:5]
            ]
        lines += [f"  {count:,} x {note}" for note, count in self.notes.items()]
        lines += [f"  not served: {count:,} x {reason}" for reason, count in self.rejects.items()]
        return "\n".join(lines + [f"  WARNING: {text}" for text in self.inconsistencies])

    def _compared(self) -> str:
        if self.differing_outputs is None:
            return ""
        if not self.differing_outputs:
            return "; all answers are the same without the drafter"
        kinds = f"{self.near_ties:,} near ties (within {self.near_tie_nats:g} nats), {self.unexplained:,} unexplained"
        return f"; {self.differing_outputs:,} answers differ from those without the drafter: {kinds}"


def compare(
    config: ServeConfig,
    speculative: int,
    sources: Sequence[str],
    drafted: Served,
    plain: Served | None,
    rejects: dict[str, int] | None = None,
    notes: dict[str, int] | None = None,
) -> ServedResult:
    """Put the servers' numbers side by side. sources: of each prompt. plain: without a drafter, compared with `drafted` already."""
    drafts, accepted = drafted.counters.get("drafts", 0), drafted.counters.get("accepted_tokens", 0)
    per_position = drafted.accepted_per_position
    compared = plain is not None and config.temperature == 0
    found = plain.differences if plain is not None and compared else []
    ties = sum(each.is_near_tie(config.near_tie_nats) for each in found)
    rate_with = drafted.tokens / drafted.seconds
    rate_without = plain.tokens / plain.seconds if plain is not None else None
    return ServedResult(
        prompts=len(drafted.outputs),
        rejects=rejects or {},
        notes=notes or {},
        temperature=config.temperature,
        num_speculative_tokens=speculative,
        drafts=drafts,
        draft_tokens=drafted.counters.get("draft_tokens", 0),
        accepted_tokens=accepted,
        accepted_per_position=per_position,
        conditional_per_position=[now / before if before else 0.0 for now, before in zip(per_position, (drafts, *per_position))],
        tau=1 + accepted / drafts if drafts else None,
        tau_interval=_over_prompts(drafted.steps_by_accepted, config),
        by_source=_by_source(sources, drafted.steps_by_accepted, config),
        output_tokens_without=plain.tokens if plain is not None else None,
        output_tokens_with=drafted.tokens,
        tokens_per_second_without=rate_without,
        tokens_per_second_with=rate_with,
        speed_up=rate_with / rate_without if rate_without else None,
        differing_outputs=len(found) if compared else None,
        near_ties=ties if compared else None,
        unexplained=len(found) - ties if compared else None,
        near_tie_nats=config.near_tie_nats,
        first_differences=[(each.prompt, each.place) for each in found],
        differences=list(found),
        inconsistencies=inconsistencies(drafted, speculative),
    )


def inconsistencies(served: Served, speculative: int) -> list[str]:
    """What contradicts itself in a server's counters."""
    drafts, proposed, accepted = (served.counters.get(name, 0) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    found, by_place = [], served.accepted_per_position
    if sum(by_place) != accepted:
        found.append(f"vLLM counted {accepted:,} accepted tokens, but {sum(by_place):,} by place")
    if any(later > earlier for earlier, later in pairwise(by_place)):
        found.append(f"vLLM counted a later place more often than an earlier one: {by_place}")
    if proposed > drafts * speculative:
        found.append(f"vLLM counted {proposed:,} drafted tokens in {drafts:,} drafts of at most {speculative}")
    if served.steps_by_accepted is not None and (told := _sums(served.steps_by_accepted).sum(0).astype(int).tolist()) != [drafts, accepted]:
        found.append(f"vLLM counted {drafts:,} drafts and {accepted:,} accepted tokens, but {told[0]:,} and {told[1]:,} over the requests")
    return found


def _sums(steps_by_accepted: Sequence[Sequence[int]]) -> np.ndarray:
    """[P, 2]: drafts and accepted tokens of each prompt."""
    pairs = [(sum(steps), sum(accepted * count for accepted, count in enumerate(steps))) for steps in steps_by_accepted]
    return np.array(pairs, dtype=np.float64).reshape(len(pairs), 2)


def _over_prompts(steps_by_accepted: Sequence[Sequence[int]] | None, config: ServeConfig) -> Interval | None:
    if steps_by_accepted is None:
        return None
    sums_P2 = _sums(steps_by_accepted)
    return intervals(sums_P2[:, 1:], sums_P2[:, :1], resamples=config.resamples, seed=config.seed, offset=1.0)[0]


def _by_source(sources: Sequence[str], steps: Sequence[Sequence[int]] | None, config: ServeConfig) -> dict[str, SourceResult] | None:
    if steps is None:
        return None
    found = {}
    for source in dict.fromkeys(sources):
        of_source = [each for each, name in zip(steps, sources, strict=True) if name == source]
        drafts, accepted = _sums(of_source).sum(0).astype(int).tolist()
        tau = 1 + accepted / drafts if drafts else None
        found[source] = SourceResult(len(of_source), tau, _over_prompts(of_source, config), drafts, accepted)
    return found


def _interval(found: Interval | None) -> str:
    return f" [{found[0]:.3f}, {found[1]:.3f}]" if found is not None else ""
