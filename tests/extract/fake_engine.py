"""An engine that needs no model: states are a ruler, a function of the document's key, the token, the layer and the place.

Uses the real Intake and so the real writer. Documents of some rows get a state that is not finite, and are rejected. With generation the
answer is a function of the prompt: a few letters and the end-of-turn token, which now and then is missing. Three turns are at work at once.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import tiny_target as tiny

from dflash_cache.common.sample import NO_TOKEN, Sample
from dflash_cache.extract.engine import Document, EngineJob, Outcome, WriterCounts
from dflash_cache.extract.intake import Intake
from dflash_cache.extract.turns import Turn, Turns

AT_WORK = 3
END_ID = tiny.SPECIAL.index(tiny.END)


def ruler(key: bytes, tokens: int, layers: int, width: int) -> np.ndarray:
    """uint16 [tokens, layers, width]: finite bfloat16 patterns that differ by document, token, layer and place."""
    start = int.from_bytes(key[:4], "little")
    steps = 977 * np.arange(tokens)[:, None, None] + 131 * np.arange(layers)[None, :, None] + np.arange(width)[None, None, :]
    return ((start + steps) % 0x7000).astype(np.uint16)


def letters(text: str) -> list[int]:
    """Ids of printable ASCII without spaces, in `tiny_target`'s tokenizer, which are in the order of their codes."""
    return [len(tiny.SPECIAL) + ord(letter) - ord("!") for letter in text]


def fake_answer(prompt_ids: np.ndarray) -> np.ndarray:
    """int32 [N]: one to six letters, ended in eight of nine cases."""
    chance = zlib.crc32(prompt_ids.astype(np.int32).tobytes())
    said = letters("".join(chr(ord("a") + (chance >> shift) % 26) for shift in range(1 + chance % 6)))
    return np.array(said + [END_ID] * (chance % 9 > 0), np.int32)


class FakeEngine:
    """See `engine.Engine`."""

    pause_seconds = 0.0
    """Between two documents."""
    reject_every = 0
    """Of the source's rows, each so-many-th gives a state that is not finite; 0: none."""

    def __init__(self, job: EngineJob) -> None:
        self.job = job
        self._turns = Turns(job)
        self._intake = Intake(job.cache, job.writer_id)

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        """See `engine.Engine`."""
        if self.job.config.generate:
            yield from self._converse(iter(documents))
            return
        for document in documents:
            time.sleep(self.pause_seconds)
            yield [self._store(document)]

    def answer(self, turn: Turn) -> np.ndarray:
        """What the target says."""
        return fake_answer(turn.document.input_ids)

    def _converse(self, documents: Iterator[Document]) -> Iterator[list[Outcome]]:
        turns: deque[Turn] = deque()
        while True:
            while len(turns) < AT_WORK and (document := next(documents, None)) is not None:
                turns.append(Turns.first(document))
            if not turns:
                return
            turn = turns.popleft()
            time.sleep(self.pause_seconds)
            answer = self.answer(turn)
            outcomes = [self._keep(turn, *turn.rows(answer), len(answer))] if turn.stored else []
            following = self._turns.following(turn, answer)
            if isinstance(following, Turn):
                turns.append(following)
            else:
                outcomes += following
            yield outcomes

    def counts(self) -> WriterCounts:
        """See `engine.Engine`."""
        return WriterCounts(**self._intake.counts())

    def close(self, *, publish: bool) -> WriterCounts:
        """See `engine.Engine`."""
        self._intake.close(publish=publish)
        return self.counts()

    def _store(self, document: Document) -> Outcome:
        return self._keep(Turns.first(document), document.input_ids, document.loss_mask, NO_TOKEN, 0)

    def _keep(self, turn: Turn, input_ids: np.ndarray, loss_mask: np.ndarray, next_token: int, written: int) -> Outcome:
        spec, document = self.job.spec, turn.document
        states = ruler(document.key, len(input_ids), len(spec.layer_ids) + 1, spec.hidden_size)
        if self.reject_every and document.source_row % self.reject_every == self.reject_every - 1:
            states[-1, 0, 0] = 0x7FC0
        top1 = int(input_ids.sum()) % spec.settings.target.vocab_size
        sample = Sample(
            key=document.key,
            source=document.source,
            source_row=document.source_row,
            input_ids=input_ids,
            loss_mask=loss_mask,
            hidden_states=states[:, :-1],
            verifier_last_hidden_states=states[:, -1],
            engine_top1=top1,
            next_token=next_token,
        )
        reason = self._intake.offer(sample)
        if reason is not None:
            return turn.rejected(reason, written)
        return turn.outcome(len(input_ids), int(loss_mask.sum()), next_token, top1, states[-1, -1].copy(), written)
