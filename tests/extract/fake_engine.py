"""An engine that needs no model: states are a ruler, a function of the document's key, the token, the layer and the place.

Uses the real Intake and so the real writer. Documents of some rows get a state that is not finite, and are rejected.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import numpy as np

from dflash_cache.common.sample import NO_TOKEN, Sample
from dflash_cache.extract.engine import Document, EngineJob, Outcome, WriterCounts
from dflash_cache.extract.intake import Intake


def ruler(key: bytes, tokens: int, layers: int, width: int) -> np.ndarray:
    """uint16 [tokens, layers, width]: finite bfloat16 patterns that differ by document, token, layer and place."""
    start = int.from_bytes(key[:4], "little")
    steps = 977 * np.arange(tokens)[:, None, None] + 131 * np.arange(layers)[None, :, None] + np.arange(width)[None, None, :]
    return ((start + steps) % 0x7000).astype(np.uint16)


class FakeEngine:
    """See `engine.Engine`."""

    pause_seconds = 0.0
    """Between two documents."""
    reject_every = 0
    """Of the source's rows, each so-many-th gives a state that is not finite; 0: none."""

    def __init__(self, job: EngineJob) -> None:
        self.job = job
        self._intake = Intake(job.cache, job.writer_id)

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        """See `engine.Engine`."""
        for document in documents:
            time.sleep(self.pause_seconds)
            yield [self._store(document)]

    def counts(self) -> WriterCounts:
        """See `engine.Engine`."""
        return WriterCounts(**self._intake.counts())

    def close(self, *, publish: bool) -> WriterCounts:
        """See `engine.Engine`."""
        self._intake.close(publish=publish)
        return self.counts()

    def _store(self, document: Document) -> Outcome:
        spec = self.job.spec
        states = ruler(document.key, len(document), len(spec.layer_ids) + 1, spec.hidden_size)
        if self.reject_every and document.source_row % self.reject_every == self.reject_every - 1:
            states[-1, 0, 0] = 0x7FC0
        top1 = int(document.input_ids.sum()) % spec.settings.target.vocab_size
        sample = Sample(
            key=document.key,
            source=document.source,
            source_row=document.source_row,
            input_ids=document.input_ids,
            loss_mask=document.loss_mask,
            hidden_states=states[:, :-1],
            verifier_last_hidden_states=states[:, -1],
            engine_top1=top1,
            next_token=NO_TOKEN,
        )
        reason = self._intake.offer(sample)
        if reason is not None:
            return Outcome(document, reject=reason)
        return Outcome(document, len(document), int(document.loss_mask.sum()), top1, states[-1, -1].copy())
