"""When disagreement is too much: the one rule by which extraction stops and verification fails. Pure arithmetic."""

from __future__ import annotations

MAX_DISAGREEMENT = 0.02
"""Share of samples whose stored state may give another token than the engine's."""


def too_many(wrong: int, samples: int, share: float = MAX_DISAGREEMENT) -> bool:
    """True when `wrong` of `samples` is more than `share` of them; a single one among several is forgiven."""
    return wrong > share * samples and (wrong > 1 or 2 * wrong > samples)
