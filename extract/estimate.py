"""`dflash extract --estimate`: how many tokens, bytes and parts an extraction would give. Writes nothing, starts no engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .config import ExtractConfig
from .prepare import prepare
from .rejects import count_reasons
from .run import make_plan

STORED_SHARE = {7: 0.69, 3: 0.45}
"""Stored bytes over plain bfloat16 by mantissa bits kept, as measured on real activations."""


@dataclass(frozen=True)
class Estimate:
    """What an extraction would give; with generation at most."""

    rows: int
    samples: int
    rejects: int
    reject_reasons: dict[str, int]
    tokens: int
    """At most, when the target writes the answers."""
    supervised_tokens: int
    raw_bytes: int
    """As plain bfloat16."""
    stored_bytes: int
    parts: int
    """If each is published because it is full."""
    layer_ids: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """As a JSON document."""
        return asdict(self)

    def to_text(self) -> str:
        """For people."""
        lines = [f"{self.rows:,} rows: {self.samples:,} samples, {self.rejects:,} rejects"]
        lines += [f"  {count:,} x {reason}" for reason, count in self.reject_reasons.items()]
        lines.append(f"at most {self.tokens:,} tokens ({self.supervised_tokens:,} supervised), layers {', '.join(map(str, self.layer_ids))}")
        lines.append(f"about {self.stored_bytes / 1e9:.3f} GB on disk ({self.raw_bytes / 1e9:.3f} GB raw) in {self.parts} parts")
        return "\n".join(lines)


def estimate(config: ExtractConfig) -> Estimate:
    """Read and tokenize everything, and count. Raises InputError as `run` does."""
    plan = make_plan(config)
    prepared = prepare(config, plan.target, plan.tokenizer, plan.created_at)
    tokens = sum(len(document) for document in prepared.documents)
    supervised = sum(int(document.loss_mask.sum()) for document in prepared.documents)
    if config.generate:
        supervised = sum(min(config.max_new_tokens, config.max_length - len(document)) for document in prepared.documents)
        tokens += supervised - len(prepared.documents)  # the last token of an answer has no row
    raw_bytes = tokens * plan.spec.raw_bytes_per_token
    layers = len(plan.spec.layer_ids)
    share = (layers * STORED_SHARE[config.mantissa_bits] + STORED_SHARE[7]) / (layers + 1)
    return Estimate(
        rows=prepared.rows,
        samples=len(prepared.documents),
        rejects=len(prepared.rejects),
        reject_reasons=count_reasons(prepared.rejects),
        tokens=tokens,
        supervised_tokens=supervised,
        raw_bytes=raw_bytes,
        stored_bytes=round(raw_bytes * share),
        parts=-(-tokens // config.part_tokens),
        layer_ids=plan.spec.layer_ids,
    )
