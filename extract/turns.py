"""Turns: a conversation whose answers the target writes, from one request to the next.

Both engines go through it: they ask a Turn, give its answer to `Turns.following`, and ask what comes back. Owns what the next prompt is,
what of it is learned from, and why a conversation ends early; engines own the asking. A document of one turn passes through unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

import numpy as np

from ..common.sample import NO_TOKEN
from .claims import Answer, answer_text, claim
from .engine import Document, EngineJob, Outcome
from .rejects import RowRejected
from .tokens import ConversationTokenizer, load_tokenizer

REWRITTEN = "an earlier answer stands otherwise in the last history and is not learned from"


@dataclass(frozen=True, eq=False)
class Turn:
    """One request to the target."""

    document: Document
    """With this turn's key and prompt, and the mask of that prompt."""
    whole: Document
    """The document that the engine was given."""
    answers: tuple[Answer, ...] = ()
    """Of the turns before."""
    written: int = 0
    """Tokens that the target wrote since the last turn that ended a sample."""
    notes: tuple[str, ...] = ()

    @property
    def stored(self) -> bool:
        """Does it end a sample? Otherwise it is answered without capture."""
        return self.document.key in self.whole.keys

    def rows(self, answer: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """(int32 [T], uint8 [T], next token): what is stored of prompt and answer. The answer's last token has no row."""
        fed = np.concatenate([self.document.input_ids, answer[:-1]]).astype(np.int32)
        mask = np.concatenate([self.document.loss_mask, np.ones(len(answer) - 1, np.uint8)])
        return fed, mask, int(answer[-1])

    def outcome(self, tokens: int, supervised: int, next_token: int, top1: int, verifier_bits_H: np.ndarray, answer_tokens: int) -> Outcome:
        """That its sample was stored. supervised: rows that are learned from; a next token is learned as well."""
        learned = supervised + (next_token != NO_TOKEN)
        return Outcome(self.document, tokens, learned, top1, verifier_bits_H, generated_tokens=self.written + answer_tokens, notes=self.notes)

    def rejected(self, reason: str, answer_tokens: int = 0) -> Outcome:
        """That its sample was not stored."""
        return Outcome(self.document, reject=reason, generated_tokens=self.written + answer_tokens)


class Turns:
    """Renders the turns of conversations with the target's template, as an extraction's rows are rendered."""

    def __init__(self, job: EngineJob) -> None:
        self._job = job

    @cached_property
    def _converter(self) -> ConversationTokenizer:
        """Loaded when a conversation goes on: documents of one turn need none."""
        job, config = self._job, self._job.config
        tokenizer = load_tokenizer(
            job.target.folder, trust_remote_code=config.trust_remote_code, place=f"--model {config.model}", chat_template=config.chat_template
        )
        created = job.spec.provenance.created_at
        now = datetime.fromisoformat(created) if created else None
        return ConversationTokenizer(tokenizer, (), config.max_length, now, template_args=config.template_args)

    @staticmethod
    def first(document: Document) -> Turn:
        """The turn with which a document begins."""
        if document.script is None:
            return Turn(document, document)
        return Turn(replace(document, key=document.script.keys[0]), document)

    def following(self, turn: Turn, answer: np.ndarray) -> Turn | list[Outcome]:
        """What comes after `answer` (int32 [N]): the next turn, or the outcomes of samples that will not be, none at an ordinary end."""
        script, number = turn.whole.script, len(turn.answers) + 1
        if script is None or not script.stored_from(number):
            return []
        written = 0 if turn.stored else turn.written + len(answer)
        try:
            answers = (*turn.answers, self._checked(turn, answer))
            return self._ask(replace(turn, answers=answers, written=written))
        except RowRejected as rejected:
            return self._rejects(replace(turn, written=written), number, str(rejected))

    def refuse(self, turn: Turn, reason: str) -> list[Outcome]:
        """The outcomes of a turn that the engine does not take, and of those after it."""
        if turn.whole.script is None:
            return [turn.rejected(reason)]
        return self._rejects(turn, len(turn.answers), reason)

    def _rejects(self, turn: Turn, number: int, reason: str) -> list[Outcome]:
        script = turn.whole.script
        assert script is not None
        outcomes, count = [], len(script.keys)
        for key in script.stored_from(number):
            place = f"turn {number + 1} of {count}"
            if self._job.config.turns == "each" and (own := script.keys.index(key)) > number:
                place = f"turn {own + 1} of {count}, as turn {number + 1}"
            outcomes.append(replace(turn, document=replace(turn.whole, key=key)).rejected(f"{reason} ({place})"))
            turn = replace(turn, written=0)  # counted once
        return outcomes

    def _checked(self, turn: Turn, ids: np.ndarray) -> Answer:
        """The answer of a turn that others follow. Raises RowRejected for one that no conversation goes on from."""
        if not len(ids) or int(ids[-1]) not in self._job.stop_token_ids:
            raise RowRejected(f"an answer was cut at {len(ids)} tokens, before its end, so that the next question cannot be asked")
        text = answer_text(self._converter.tokenizer, turn.document.input_ids, ids[:-1])
        if not text.strip():
            raise RowRejected("an answer is empty, so that the next question cannot be asked")
        return Answer(turn.document.input_ids, ids, text)

    def _ask(self, turn: Turn) -> Turn:
        """The turn behind its `answers`. Raises RowRejected when it cannot be asked."""
        script, config, number = turn.whole.script, self._job.config, len(turn.answers)
        assert script is not None
        conversation = script.conversation([answer.text for answer in turn.answers])
        question = self._converter.question(conversation)
        vocab_size = self._job.target.spec.vocab_size
        if int(question.input_ids.max()) >= vocab_size:
            raise RowRejected(f"token {int(question.input_ids.max())} is not in the target's embedding of {vocab_size} rows")
        mask = np.full(len(question.input_ids), config.supervise == "all", np.uint8)
        notes: tuple[str, ...] = ()
        if config.supervise == "assistant" and config.turns == "all" and number + 1 == len(script.keys):
            mask, claimed = claim(
                question.text,
                question.input_ids,
                question.tokens,
                conversation.messages,
                turn.answers,
                script.answer_places(number),
                self._converter.template.for_row(script.tools, script.template_args),
                self._converter.template.generation_prompt(script.template_args) or "",
            )
            notes = (REWRITTEN,) * (claimed < number)
        document = replace(turn.whole, key=script.keys[number], input_ids=question.input_ids, loss_mask=mask)
        return replace(turn, document=document, notes=notes)
