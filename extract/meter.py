"""How an extraction is getting on: beside the progress bar for people, and as lines of the log.

In: the account, and the writer's counts after each answer of the engine. Decides nothing.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from ..common.progress import ProgressBar
from .account import Account
from .engine import WriterCounts
from .extract_log import ExtractLog

STEP_SECONDS = 10.0
"""Between two `progress` lines of the log."""


class Meter:
    """Shows and logs the state of a run. `step` after every answer of the engine."""

    def __init__(self, bar: ProgressBar, log: ExtractLog, account: Account, raw_bytes_per_token: int) -> None:
        self._bar, self._log, self._account, self._raw = bar, log, account, raw_bytes_per_token
        self._started = self._last = time.monotonic()
        self._parts = 0

    @property
    def seconds(self) -> float:
        """Since the engine was ready."""
        return time.monotonic() - self._started

    def step(self, documents: int, counts: WriterCounts) -> None:
        """`documents` more are done (fewer when some have to be done again); `counts` as of now."""
        self._bar.update(documents, self.note(counts))
        now = time.monotonic()
        if counts.parts != self._parts or now - self._last >= STEP_SECONDS:
            self._log.write("part" if counts.parts != self._parts else "progress", **self.state(counts))
            self._parts, self._last = counts.parts, now

    def state(self, counts: WriterCounts) -> dict[str, Any]:
        """The counts as they stand in the log. samples, tokens: computed by this run; `published` is what would outlive a crash."""
        account = self._account
        return {
            "samples": account.samples,
            "tokens": account.tokens,
            "rejects": len(account.rejects),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self._rate(account.tokens), 1),
            "generated_tokens": account.generated_tokens,
            "generated_per_second": round(self._rate(account.generated_tokens), 1),
            "ratio_to_raw": self._ratio(counts),
            "published": asdict(counts),
        }

    def note(self, counts: WriterCounts) -> str:
        """`5,120 tokens/s, 1,730 generated/s, 12.30 GB written, 0.690 of raw, 3 rejected`; generated only when the target writes."""
        ratio = self._ratio(counts)
        of_raw = f", {ratio:.3f} of raw" if ratio is not None else ""
        account = self._account
        generated = f", {self._rate(account.generated_tokens):,.0f} generated/s" if account.generated_tokens else ""
        written = f"{counts.stored_bytes / 1e9:,.2f} GB written{of_raw}"
        return f"{self._rate(account.tokens):,.0f} tokens/s{generated}, {written}, {len(account.rejects):,} rejected"

    def _rate(self, tokens: int) -> float:
        return tokens / self.seconds if self.seconds else 0.0

    def _ratio(self, counts: WriterCounts) -> float | None:
        return round(counts.stored_bytes / (counts.tokens * self._raw), 4) if counts.tokens else None
