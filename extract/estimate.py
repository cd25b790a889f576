"""`dflash extract --estimate`: how many tokens, bytes, parts and hours an extraction would take. Writes nothing, starts no engine.

Rows are counted, a seeded sample of them is tokenized, and the rest follows from their mean. A small dataset is tokenized whole.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ..common.progress import ProgressBar
from .config import ExtractConfig
from .dataset import Row, count_rows, read_rows, sample_rows
from .engine import Document
from .plan import Plan, make_plan
from .prepare import documents_of, make_converter
from .rejects import Reject, count_reasons
from .script import most_rows
from .sources import Source

SAMPLED_ROWS = 2000
"""Of each source."""
STORED_SHARE = {7: 0.69, 3: 0.45}
"""Stored bytes over plain bfloat16 by mantissa bits kept, as measured on real activations (docs/measurements.md)."""
PREFILL_FLOPS = 650e12
"""Of one H200 in vLLM's prefill, bfloat16: 41,661 tokens/s of Qwen3-8B times 2 x 7.57 billion parameters is 631e12."""
MEASURED_RATE = 85_000
"""Tokens/s of the fastest extraction measured on one H200 (28 blocks of width 1024); small targets are not bound by their products."""


@dataclass(frozen=True)
class Estimate:
    """What an extraction would give; with generation at most."""

    rows: int
    sampled_rows: int
    """Of them, those that were tokenized; all when they are equally many."""
    samples: int
    rejects: int
    reject_reasons: dict[str, int]
    """Among the sampled rows."""
    tokens: int
    is_bound: bool
    """`tokens` is what there can be at most, because the target writes the answers."""
    tokens_error: int
    """Standard error of `tokens`; 0 when every row was tokenized."""
    supervised_tokens: int
    raw_bytes: int
    """As plain bfloat16."""
    stored_bytes: int
    parts: int
    """If each is published because it is full."""
    hours: float | None
    """Of one engine at `tokens_per_second`; None when no rate is known."""
    tokens_per_second: float | None
    """As the user gave it, else what one H200 should reach in prefill."""
    rate_is_given: bool
    layer_ids: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """As a JSON document."""
        return asdict(self)

    def to_text(self) -> str:
        """For people."""
        sampled = "" if self.sampled_rows == self.rows else f" (from {self.sampled_rows:,} of them)"
        error = f" ± {self.tokens_error:,}" if self.tokens_error else ""
        lines = [f"{self.rows:,} rows{sampled}: {self.samples:,} samples, {self.rejects:,} rejects"]
        lines += [f"  {count:,} x {reason}" for reason, count in self.reject_reasons.items()]
        lines.append(
            f"{'at most ' if self.is_bound else ''}{self.tokens:,}{error} tokens ({self.supervised_tokens:,} supervised), layers {', '.join(map(str, self.layer_ids))}"
        )
        lines.append(f"about {self.stored_bytes / 1e9:.3f} GB on disk ({self.raw_bytes / 1e9:.3f} GB raw) in {self.parts:,} parts")
        if self.hours is None:
            lines.append("hours: not known for answers to be written; give --tokens-per-second, as a short run prints it")
        else:
            whose = "as given" if self.rate_is_given else "what one H200 should reach in prefill"
            lines.append(f"about {self.hours:.2f} hours at {self.tokens_per_second:,.0f} tokens/s ({whose})")
        return "\n".join(lines)


@dataclass
class _Sums:
    """Over all sources; those of a sampled one are scaled up."""

    rows: int = 0
    sampled: int = 0
    samples: float = 0
    rejects: float = 0
    tokens: float = 0
    supervised: float = 0
    variance: float = 0
    """Of `tokens`."""
    reasons: Counter[str] = field(default_factory=Counter)


def estimate(config: ExtractConfig, tokens_per_second: float | None = None) -> Estimate:
    """Count rows, tokenize a sample, and say what follows. Raises InputError as `run` does.

    tokens_per_second: of the engine; None takes an H200's prefill of a model of this size, and knows nothing of generation.
    """
    plan = make_plan(config)
    converter = make_converter(config, plan.target, plan.tokenizer, plan.created_at)
    sums, left = _Sums(), config.limit
    with ProgressBar("sampling rows", None) as bar:
        for source in plan.sources:
            if left == 0:
                break
            wanted = source if left is None else replace(source, limit=min(left, source.limit or left))
            count, rows = _choose(wanted, config.seed)
            left = None if left is None else left - count
            lengths: list[tuple[int, int]] = []
            rejects: list[Reject] = []
            documents = 0
            for row in rows:
                bar.update(1)
                tokens = supervised = 0
                for item in documents_of(row, config, converter, plan.target.spec.vocab_size, Counter(), Counter()):
                    if isinstance(item, Reject):
                        rejects.append(item)
                        continue
                    documents += 1
                    of_item = _lengths(item, config)
                    tokens, supervised = tokens + of_item[0], supervised + of_item[1]
                lengths.append((tokens, supervised))
            _add(sums, count, lengths, documents, rejects)
    return _result(plan, sums, tokens_per_second)


def stored_share(layers: int, mantissa_bits: int) -> float:
    """Stored bytes over plain bfloat16 with so many feature layers; the verifier's states are always lossless."""
    return (layers * STORED_SHARE[mantissa_bits] + STORED_SHARE[7]) / (layers + 1)


def _choose(source: Source, seed: int) -> tuple[int, list[Row]]:
    """How many rows there are, and those to look at."""
    count = count_rows(source)
    if count is not None and count > SAMPLED_ROWS:
        return count, sample_rows(source, SAMPLED_ROWS, seed)
    kept: list[Row] = []
    seeded = random.Random(seed)
    count = 0
    for count, row in enumerate(read_rows([source], seed=seed), 1):  # a reservoir: every row is as likely to stay
        if len(kept) < SAMPLED_ROWS:
            kept.append(row)
        elif (place := seeded.randrange(count)) < SAMPLED_ROWS:
            kept[place] = row
    return count, kept


def _lengths(document: Document, config: ExtractConfig) -> tuple[int, int]:
    """(rows to store, supervised tokens); of answers to be written the most that they may have, whose last token has no row."""
    if not config.generate:
        return len(document), int(document.loss_mask.sum())
    script, samples = document.script, len(document.keys)
    given, turns = (len(document), 1) if script is None else (script.given_tokens, len(script.rounds))
    rows = most_rows(given, turns, samples, config.max_new_tokens, config.max_length)
    if config.supervise == "all":
        return rows, rows + samples
    learned = samples if config.supervise == "last" else max(turns, samples)
    return rows, min(learned * config.max_new_tokens, rows + samples * (1 - len(document)))


def _add(sums: _Sums, count: int, lengths: list[tuple[int, int]], documents: int, rejects: list[Reject]) -> None:
    if not lengths:
        return
    scale = count / len(lengths)
    tokens = [length for length, _ in lengths]
    sums.rows += count
    sums.sampled += len(lengths)
    sums.samples += scale * documents
    sums.rejects += scale * len(rejects)
    sums.tokens += scale * sum(tokens)
    sums.supervised += scale * sum(supervised for _, supervised in lengths)
    sums.reasons.update(count_reasons(rejects))
    if 1 < len(lengths) < count:
        sums.variance += count**2 * float(np.var(tokens, ddof=1)) / len(lengths) * (1 - len(lengths) / count)


def _result(plan: Plan, sums: _Sums, rate: float | None) -> Estimate:
    tokens = round(sums.tokens)
    raw_bytes = tokens * plan.spec.raw_bytes_per_token
    share = stored_share(len(plan.spec.layer_ids), plan.config.mantissa_bits)
    given = rate is not None
    if not given and not plan.config.generate:
        rate = min(PREFILL_FLOPS / (2 * plan.target.active_parameters), MEASURED_RATE)
    return Estimate(
        rows=sums.rows,
        sampled_rows=sums.sampled,
        samples=round(sums.samples),
        rejects=round(sums.rejects),
        reject_reasons=dict(sums.reasons.most_common()),
        tokens=tokens,
        is_bound=plan.config.generate,
        tokens_error=round(math.sqrt(sums.variance)),
        supervised_tokens=round(sums.supervised),
        raw_bytes=raw_bytes,
        stored_bytes=round(raw_bytes * share),
        parts=-(-tokens // plan.config.part_tokens),
        hours=None if rate is None else tokens / rate / 3600,
        tokens_per_second=rate,
        rate_is_given=given,
        layer_ids=plan.spec.layer_ids,
    )
